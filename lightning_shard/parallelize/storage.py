"""In which type a parameter is stored, and in which it computes."""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_shard.specs import Precision


def to_dtype(name: str | None) -> torch.dtype | None:
    """The torch type of that name ("bfloat16"); None stays None."""
    if name is None:
        return None
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@dataclass(frozen=True)
class Storage:
    """What :func:`store` changed: parameters whose products run in another type than they are stored in."""

    compute_dtypes: dict[nn.Parameter, torch.dtype] = field(default_factory=dict)
    """Parameter -> type it computes in, for every parameter where the two differ."""
    loaded_dtypes: dict[nn.Parameter, torch.dtype] = field(default_factory=dict)
    """Parameter -> type it had before anything was changed."""


def store(module: nn.Module, precision: Precision, earlier: Storage | None = None) -> Storage:
    """Give every floating parameter its stored type, in place, and say in which type it computes.

    What trains is kept in the master type (FP32: smaller updates would be lost to rounding). What is
    frozen never changes, so it needs no master and is kept in the compute type under ``bf16-true``.
    Buffers keep their type, unless all is to be wide (``64-true``): rotary frequencies in bf16 are wrong frequencies.
    ``earlier`` is what a previous layout
    of the same module changed: the types it was loaded in decide, not those that were left behind, and what has a
    master keeps it: it may train again.
    """
    master, frozen = to_dtype(precision.master_dtype), to_dtype(precision.frozen_dtype)
    compute = to_dtype(precision.compute_dtype) if precision.frozen_dtype else None
    compute_dtypes: dict[nn.Parameter, torch.dtype] = {}
    loaded_dtypes = dict(earlier.loaded_dtypes) if earlier is not None else {}
    masters = earlier.compute_dtypes if earlier is not None else {}
    assert master is not None
    if frozen is not None and frozen.itemsize > torch.float32.itemsize:
        _widen_buffers(module, frozen)
    for parameter in unique_parameters(module):
        if not parameter.is_floating_point() or parameter.element_size() < 2:
            continue  # quantised storage is the quantiser's business
        if is_packed(parameter):
            continue
        loaded_as = loaded_dtypes.setdefault(parameter, parameter.dtype)
        if parameter.requires_grad or parameter in masters:
            if loaded_as.itemsize < master.itemsize or compute is not None:
                _cast(parameter, master)
            wanted = compute or loaded_as
            if wanted.itemsize < parameter.dtype.itemsize and wanted.itemsize == 2:
                compute_dtypes[parameter] = wanted
        elif frozen is not None:
            _cast(parameter, frozen)
    return Storage(compute_dtypes, loaded_dtypes)


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` only looks like its type and shape, and stores something else (torchao's quantised weights)."""
    return hasattr(tensor, "__tensor_flatten__") and not isinstance(tensor, DTensor)


def packed_parts(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a packed tensor stores, by the names it gives; a plain tensor is its own only part, named ""."""
    if not is_packed(tensor):
        return {"": tensor}
    names: list[str] = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    inner = {f".{name}": packed_parts(getattr(tensor, name)) for name in names if getattr(tensor, name) is not None}
    return {f"{name}{rest}": part for name, parts in inner.items() for rest, part in parts.items()}


def unique_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Every parameter once, tied ones included once."""
    return list(module.parameters())


def _widen_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.to(dtype)


def _cast(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    if parameter.dtype != dtype:
        # Through .data, so that the object (and an optimizer or a tie that holds it) stays the same.
        parameter.data = parameter.data.to(dtype)
