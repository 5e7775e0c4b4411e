"""Norms that compute in FP32 whatever the precision, where that is asked for."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.parallelize.cast import cast_tensors
from lightning_shard.specs import Precision


def find_norms(root: nn.Module) -> Iterator[nn.Module]:
    """The layers named after a norm that have weights: ``LayerNorm``, ``LlamaRMSNorm``, ``BatchNorm2d``."""
    for module in root.modules():
        leaf = next(module.children(), None) is None
        if leaf and "norm" in type(module).__name__.lower() and next(module.parameters(), None) is not None:
            yield module


def kept_wide(root: nn.Module, precision: Precision) -> set[nn.Parameter]:
    """The weights of :func:`find_norms`, where they are to stay in FP32."""
    norms = find_norms(root) if precision.norms_in_fp32 else ()
    return {parameter for norm in norms for parameter in norm.parameters()}


def compute_wide(root: nn.Module, precision: Precision) -> list[Any]:
    """Have every norm below ``root`` take its input in FP32 and give its result in the type the input had, where asked.

    Returns:
        Hooks, whose ``remove()`` takes this off again.

    Raises:
        ValueError: under tensor parallelism, which keeps some norms in parts.
    """
    if not precision.norms_in_fp32:
        return []
    if any(isinstance(parameter, DTensor) and "tp" in _axes(parameter) for parameter in root.parameters()):
        raise ValueError("norms_in_fp32=True does not work with tp above 1: leave it out, or use tp=1.")
    return [hook for norm in find_norms(root) for hook in _Wide().install(norm)]


class _Wide:
    """One norm's casts, in and out."""

    _narrow_dtype: torch.dtype | None = None
    """Of the input at work. A norm runs nothing of its own kind inside; recomputing may leave one before its end."""

    def install(self, norm: nn.Module) -> tuple[Any, Any]:
        before = norm.register_forward_pre_hook(self._widen, with_kwargs=True)
        return before, norm.register_forward_hook(self._narrow)

    def _widen(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        given = (*args, *kwargs.values())
        floating = [each for each in given if isinstance(each, Tensor) and each.is_floating_point()]
        narrow = floating[0].dtype if floating and floating[0].dtype.itemsize < 4 else None
        self._narrow_dtype = narrow
        return (args, kwargs) if narrow is None else cast_tensors((args, kwargs), torch.float32)

    def _narrow(self, _: nn.Module, __: Any, output: Any) -> Any:
        return cast_tensors(output, self._narrow_dtype)


def _axes(parameter: DTensor) -> tuple[str, ...]:
    return parameter.device_mesh.mesh_dim_names or ()
