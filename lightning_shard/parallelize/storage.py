"""In which type a parameter is stored, and in which it computes."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_shard.specs import Precision

Place = tuple[nn.Module, str]
"""A module and the name of a parameter in it. Sharding exchanges parameters; their places stay."""
Places = dict[Place, torch.dtype]
"""A type for each place."""


def to_dtype(name: str | None) -> torch.dtype | None:
    """The torch type of that name ("bfloat16"); None stays None."""
    if name is None:
        return None
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


@dataclass(frozen=True)
class Storage:
    """What :func:`store` changed: parameters whose products run in another type than they are stored in.

    By place, not by parameter: what is whole before sharding must not be kept in memory after it.
    """

    compute_dtypes: Places = field(default_factory=dict)
    """The type it computes in, for every parameter where that is not the one it is stored in."""
    loaded_dtypes: Places = field(default_factory=dict)
    """The type it had before anything was changed."""


def store(
    module: nn.Module, precision: Precision, earlier: Storage | None = None, wide: Collection[nn.Parameter] = ()
) -> Storage:
    """Give every floating parameter its stored type, in place, and say in which type it computes.

    What trains is kept in the master type (FP32: smaller updates would be lost to rounding). What is
    frozen never changes, so it needs no master and is kept in the compute type under ``bf16-true``.
    Buffers keep their type, unless all is to be wide (``64-true``): rotary frequencies in bf16 are wrong frequencies.
    ``earlier`` is what a previous layout
    of the same module changed: the types it was loaded in decide, not those that were left behind, and what has a
    master keeps it: it may train again. ``wide`` are parameters that are stored and compute in the master type.
    """
    master, frozen = to_dtype(precision.master_dtype), to_dtype(precision.frozen_dtype)
    compute = to_dtype(precision.compute_dtype) if precision.frozen_dtype else None
    earlier = earlier or Storage()
    storage = Storage()
    assert master is not None
    if frozen is not None and frozen.itemsize > torch.float32.itemsize:
        _widen_buffers(module, frozen)
    for parameter, places in with_places(module):
        if not parameter.is_floating_point() or parameter.element_size() < 2:
            continue  # quantised storage is the quantiser's business
        if is_packed(parameter):
            continue
        loaded_as = next(
            (earlier.loaded_dtypes[each] for each in places if each in earlier.loaded_dtypes), parameter.dtype
        )
        storage.loaded_dtypes.update(dict.fromkeys(places, loaded_as))
        if parameter in wide:
            _cast(parameter, master)
        elif parameter.requires_grad or any(each in earlier.compute_dtypes for each in places):
            if loaded_as.itemsize < master.itemsize or compute is not None:
                _cast(parameter, master)
            wanted = compute or loaded_as
            if wanted.itemsize < parameter.dtype.itemsize and wanted.itemsize == 2:
                storage.compute_dtypes.update(dict.fromkeys(places, wanted))
        elif frozen is not None:
            _cast(parameter, frozen)
    return storage


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


def with_places(module: nn.Module) -> list[tuple[nn.Parameter, Sequence[Place]]]:
    """Every parameter once, tied ones included once, with all places it is at."""
    found: dict[nn.Parameter, list[Place]] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, []).append((owner, name))
    return list(found.items())


def _widen_buffers(module: nn.Module, dtype: torch.dtype) -> None:
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                part._buffers[name] = buffer.to(dtype)


def _cast(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    if parameter.dtype != dtype:
        # Through .data, so that the object (and an optimizer or a tie that holds it) stays the same.
        parameter.data = parameter.data.to(dtype)
