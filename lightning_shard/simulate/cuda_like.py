"""Patches that make the CPU's operators allocate what CUDA's do, and Hugging Face's code take the path it takes there."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_shard.simulate.patches import patched


@contextmanager
def allocate_as_cuda() -> Iterator[None]:
    """Inside, dropout, attention and normalisation allocate as on CUDA."""
    with ExitStack() as stack:
        for owner, name, value in _patches():
            stack.enter_context(patched(owner, name, value))
        yield


def _patches() -> Iterator[tuple[Any, str, Any]]:
    attention = functional.scaled_dot_product_attention
    yield functional, "scaled_dot_product_attention", _without_dropout(attention)
    yield torch, "dropout", _dropout(functional.dropout)
    yield functional, "dropout", _dropout(functional.dropout)
    yield functional, "rms_norm", _fused_rms_norm
    yield torch, "rms_norm", _fused_rms_norm
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


def _fused_rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """CUDA keeps the input and one number per row; the CPU's composite keeps the input in FP32 as well."""
    result: Tensor = torch.ops.aten._fused_rms_norm(input, list(normalized_shape), weight, eps)[0]
    return result
