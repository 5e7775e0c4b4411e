"""Autocast on the CPU with CUDA's lists of operators."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from typing_extensions import override

_NAMES = (
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm "
    "native_layer_norm group_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss "
    "hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss "
    "multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss "
    "binary_cross_entropy_with_logits dist pdist cdist renorm logsumexp prod softmax log_softmax cumprod cumsum sum norm"
)
"""Operators that CUDA's autocast runs in FP32 (torch's documentation of autocast, "CUDA Ops that can autocast to
float32"); the CPU runs most of them in the type they are given."""

FP32_FUNCTIONS = {
    function
    for owner in (torch, functional, Tensor)
    for name in _NAMES.split()
    if callable(function := getattr(owner, name, None))
}


class _CudaLists(TorchFunctionMode):
    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in FP32_FUNCTIONS and torch.is_autocast_enabled("cpu") and kwargs.get("dtype") is None:
            args = tuple(_up(arg) for arg in args)
            kwargs = {name: _up(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _up(value: Any) -> Any:
    narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if narrow else value


@contextmanager
def autocast_as_cuda(dtype: torch.dtype) -> Iterator[None]:
    """Autocast to ``dtype`` that casts where CUDA's would."""
    with torch.autocast("cpu", dtype), _CudaLists():
        yield
