"""Operators whose shape functions refuse what their kernels take."""

from typing import Any

import torch
from torch import Tensor

from lightning_shard._compat import is_fake

_GROUPED_MM = torch.ops.aten._grouped_mm.default


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of ``func(*args, **kwargs)``.

    The grouped matrix product of a mixture of experts runs in FP32 as well, as under autocast; its shape
    function knows bf16 only (torch 2.13).
    """
    if func is not _GROUPED_MM or not is_fake(args[0]) or args[0].dtype is torch.bfloat16:
        return func(*args, **kwargs)
    dtype = args[0].dtype
    result: Tensor = func(*(_in_bf16(arg) for arg in args), **kwargs)
    return torch.empty_like(result, dtype=dtype)


def _in_bf16(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return torch.empty_like(value, dtype=torch.bfloat16) if floating else value
