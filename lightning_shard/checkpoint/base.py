"""A frozen base that is not saved: told apart by its content, without gathering it.

The fingerprint of a tensor is a sum over its elements of their bits times an odd number that depends on the place.
Sums over shards add up, so it is the same in every layout, and only eight bytes per tensor travel. It tells one
model from another; it is no defence against somebody who wants two models to look alike.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard._compat.storage import shard_offsets
from lightning_shard.checkpoint.errors import CheckpointError
from lightning_shard.checkpoint.names import base_path, plain_name
from lightning_shard.parallelize.together import gather

ELEMENTS_AT_ONCE = 4 * 2**20
_MIX, _SHIFT = -7046029254386353131, 29  # an odd number near 2**64 divided by the golden ratio, as a signed one
COARSE = torch.bfloat16
"""Fingerprints are also taken at this precision: the same model may be loaded in another type."""

Fingerprint = tuple[list[int], str, int, int]
"""Shape, type, fingerprint, fingerprint of the values rounded to :data:`COARSE`."""


def describe_base(module: nn.Module, names: Iterable[str], group: dist.ProcessGroup | None) -> dict[str, Any]:
    """What identifies the parameters ``names`` of ``module``. Collective over ``group``.

    Returns:
        ``path`` (folder or hub id, or None) and ``tensors`` (name to :data:`Fingerprint`).
    """
    return {"path": base_path(module), "tensors": fingerprints(_named(module, names), group)}


def require_same_base(module: nn.Module, saved: Mapping[str, Any], group: dist.ProcessGroup | None) -> None:
    """Raise CheckpointError, on all ranks, unless ``module`` stands on the base a checkpoint was trained on."""
    wanted: Mapping[str, Fingerprint] = saved["tensors"]
    ours = fingerprints(_named(module, wanted), group)
    other = [name for name in wanted if name not in ours or not _alike(ours[name], wanted[name])]
    if other:
        held = "is not in this model" if other[0] not in ours else "holds other values here"
        where = f"loaded from {saved['path']!r}" if saved["path"] else "which had no path"
        raise CheckpointError(
            f"The checkpoint holds only what was trained, on a frozen base {where}. This run's base is another one: "
            f"{len(other)} of {len(wanted)} of its tensors differ, the first is {other[0]!r}, which {held}. Load the same "
            "base before resuming."
        )


def fingerprints(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> dict[str, Fingerprint]:
    """The fingerprint of every tensor, the same on all ranks of ``group``. Collective."""
    parts: dict[str, dict[tuple[int, ...], tuple[int, int]]] = {}
    for name, tensor in tensors.items():
        parts[name] = {}
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        for offsets in shard_offsets(tensor) if local.numel() else ():  # replicas have the same offsets and count once
            parts[name][offsets] = _sum_of(local.detach(), offsets, tuple(tensor.shape))
    whole: dict[str, dict[tuple[int, ...], tuple[int, int]]] = {name: {} for name in tensors}
    sharded = {name: part for name, part in parts.items() if isinstance(tensors[name], DTensor)}
    for of_rank in gather(sharded, group):
        for name, part in of_rank.items():
            whole[name].update(part)
    result = {}
    for name, tensor in tensors.items():
        sums = (whole[name] or parts[name]).values()
        exact, coarse = sum(s[0] for s in sums) % 2**64, sum(s[1] for s in sums) % 2**64
        result[name] = (list(tensor.shape), str(tensor.dtype).removeprefix("torch."), exact, coarse)
    return result


def _named(module: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    wanted = set(names)
    named = module.named_parameters(remove_duplicate=False)
    return {plain: value for name, value in named if (plain := plain_name(name)) in wanted}


def _alike(ours: Fingerprint, saved: Fingerprint) -> bool:
    if list(ours[0]) != list(saved[0]):
        return False
    return ours[2] == saved[2] if ours[1] == saved[1] else ours[3] == saved[3]


def _sum_of(local: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, int]:
    """The part of a tensor's fingerprints that a block of it at ``offsets`` contributes."""
    exact = coarse = 0
    if hasattr(local, "__tensor_flatten__"):  # a quantised tensor: what it is made of
        inner = [getattr(local, name) for name in local.__tensor_flatten__()[0]]
        sums = [_sum_of(part, (0,) * part.dim(), tuple(part.shape)) for part in inner]
        return sum(s[0] for s in sums), sum(s[1] for s in sums)
    rows = local.reshape(local.shape[0], -1) if local.dim() else local.reshape(1, 1)
    at_once = max(1, ELEMENTS_AT_ONCE // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], at_once):
        values = rows[start : start + at_once]
        weights = _weights(local, offsets, shape, start, values.shape[0])
        exact += int((_bits(values) * weights).sum())
        rounded = values.to(COARSE) if values.is_floating_point() else values
        coarse += int((_bits(rounded) * weights).sum())
    return exact, coarse


def _weights(local: Tensor, offsets: tuple[int, ...], shape: tuple[int, ...], start: int, num_rows: int) -> Tensor:
    """An odd number for every element of some rows of a block, from its place in the whole tensor."""
    sizes = (num_rows, *local.shape[1:]) if local.dim() else (1,)
    offsets = ((offsets[0] + start, *offsets[1:])) if local.dim() else (0,)
    places = torch.zeros((), dtype=torch.int64, device=local.device)
    for size, offset, whole in zip(sizes, offsets, shape or (1,), strict=True):
        axis = torch.arange(offset, offset + size, device=local.device)
        places = places[..., None] * whole + axis
    mixed = (places.reshape(num_rows, -1) + 1) * _MIX
    mixed = (mixed ^ (mixed >> _SHIFT)) * _MIX
    return mixed | 1


def _bits(values: Tensor) -> Tensor:
    """The bits of each element as int64."""
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    plain = torch.view_as_real(values) if values.is_complex() else values
    return plain.contiguous().view(views[plain.element_size()]).to(torch.int64)
