"""Shards brought together on one rank in one message, over a group of the writers' own."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shard._compat.storage import shard_offsets
from lightning_shard.parallelize.together import gather, rank_in, size_of


def in_one_piece(value: Tensor) -> Tensor:
    """``value``, or the whole of one that lies here in several pieces (split by two axes of a mesh). Collective then."""
    return value.full_tensor() if isinstance(value, DTensor) and len(shard_offsets(value)) > 1 else value


def gather_on_first(values: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Whole tensors in host memory on the group's first rank; an empty dict elsewhere. Collective over ``group``.

    Args:
        values: plain tensors, or DTensors each in one piece per rank; the same names everywhere.
        group: on the host; None for a single rank.
    """
    first = rank_in(group) == 0
    shards = {name: value.to_local().cpu() for name, value in values.items() if isinstance(value, DTensor)}
    pieces = [(name, shard_offsets(values[name])[0], tuple(local.shape)) for name, local in shards.items()]
    whole = {name: value.cpu() for name, value in values.items() if name not in shards} if first else {}
    if shards:
        by_rank = gather(pieces, group)
        sent = _gather_bytes([shards[name] for name, *_ in pieces], _most_bytes(by_rank, shards), group)
        for flat, of_rank in zip(sent, by_rank, strict=False):
            _place(flat, of_rank, values, whole)
    return whole


def _most_bytes(by_rank: list[list[Any]], shards: Mapping[str, Tensor]) -> int:
    return max(sum(_num_bytes(shards[name], shape) for name, _, shape in of_rank) for of_rank in by_rank)


def _num_bytes(like: Tensor, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * like.element_size()


def _gather_bytes(parts: list[Tensor], size: int, group: dist.ProcessGroup | None) -> list[Tensor]:
    """What every rank sent, as bytes, on the first rank; nothing elsewhere."""
    flat = torch.zeros(size, dtype=torch.uint8)
    at = 0
    for part in parts:
        data = part.contiguous().view(-1).view(torch.uint8)
        flat[at : at + data.numel()] = data
        at += data.numel()
    if size_of(group) == 1:
        return [flat]
    first = rank_in(group) == 0
    received = [torch.empty_like(flat) for _ in range(size_of(group))] if first else None
    dist.gather(flat, received, group=group, group_dst=0)
    return received or []


def _place(flat: Tensor, pieces: list[Any], values: Mapping[str, Tensor], whole: dict[str, Tensor]) -> None:
    """Put one rank's pieces where they belong."""
    at = 0
    for name, offsets, shape in pieces:
        like = values[name]
        if name not in whole:
            whole[name] = torch.empty(like.shape, dtype=like.dtype)
        end = at + _num_bytes(like, shape)
        if end > at:
            block = tuple(slice(start, start + length) for start, length in zip(offsets, shape, strict=True))
            whole[name][block] = flat[at:end].clone().view(like.dtype).view(shape)
        at = end
