"""Patches that make the CPU's operators allocate what CUDA's do, and Hugging Face's code take the path it takes there."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from lightning_shard._compat import is_fake
from lightning_shard.parallelize import prefetch
from lightning_shard.simulate.patches import patched


@contextmanager
def allocate_as_cuda() -> Iterator[None]:
    """Inside, dropout, attention and normalisation allocate as on CUDA, and what is sharded has streams to gather on."""
    with ExitStack() as stack:
        for owner, name, value in _patches():
            stack.enter_context(patched(owner, name, value))
        yield


def _patches() -> Iterator[tuple[Any, str, Any]]:
    attention = functional.scaled_dot_product_attention
    yield functional, "scaled_dot_product_attention", _without_dropout(attention)
    yield torch, "dropout", _dropout(torch.dropout)
    yield functional, "dropout", _dropout(functional.dropout)
    yield torch, "rms_norm", _rms_norm(torch.rms_norm)
    yield functional, "rms_norm", _rms_norm(functional.rms_norm)
    yield prefetch, "has_streams", lambda mesh: True
    masking = sys.modules.get("transformers.masking_utils")
    if masking is not None and hasattr(masking, "find_packed_sequence_indices"):
        # It takes a fake tensor for one that is being traced, and then keeps a mask that no real run makes.
        yield masking, "find_packed_sequence_indices", lambda position_ids: None


def _without_dropout(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """CUDA's flash attention drops inside its kernel; the CPU would fall back to whole score matrices."""

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        return attention(query, key, value, attn_mask, 0.0, *args, **kwargs)

    return scaled_dot_product_attention


def _dropout(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """CUDA's fused dropout keeps a mask of one byte per element; the CPU's keeps one of the input's type."""

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0 or inplace or not input.is_floating_point():
            return original(input, p, training, inplace)
        return torch.native_dropout(input, p, True)[0]

    return dropout


def _rms_norm(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """CUDA's fused kernel, which it takes where input and weight have one type."""

    def rms_norm(
        input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
    ) -> Tensor:
        if not is_fake(input) or (weight is not None and weight.dtype != input.dtype):
            return original(input, normalized_shape, weight, eps)
        result: Tensor = _FusedRmsNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
        return result

    return rms_norm


class _FusedRmsNorm(torch.autograd.Function):
    """Shapes of the fused kernel: kept are the input and one FP32 number per row (the CPU keeps an FP32 input)."""

    @staticmethod
    @override
    def forward(ctx: Any, input: Tensor, weight: Tensor | None, dims: int) -> Tensor:
        rows = input.new_empty(input.shape[: input.dim() - dims], dtype=torch.float32)
        ctx.save_for_backward(input, weight, rows)
        return torch.empty_like(input)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        input, weight, _ = ctx.saved_tensors
        to_input = torch.empty_like(input) if ctx.needs_input_grad[0] else None
        to_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        return to_input, to_weight, None
