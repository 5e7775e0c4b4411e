"""One small gather instead of many: every rank's figures on every rank."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

STRAGGLES = 1.1
"""A rank whose own work takes this much longer than that of the next slowest holds the others up."""


def gather(figures: Mapping[str, float | None], device: torch.device) -> list[dict[str, float | None]]:
    """Figures of all ranks, in their order. A collective; every rank gives the same names, None for what it lacks."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return [dict(figures)]
    nan = float("nan")
    dtype = torch.float32 if device.type == "mps" else torch.float64
    mine = torch.tensor([nan if v is None else float(v) for v in figures.values()], dtype=dtype, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    rows = [dict(zip(figures, tensor.tolist(), strict=True)) for tensor in everyone]
    return [{name: None if value != value else value for name, value in row.items()} for row in rows]


def largest(rows: list[dict[str, Any]], name: str) -> float | None:
    """Over ranks; None where none has it."""
    return max((row[name] for row in rows if row[name] is not None), default=None)


def straggler(rows: list[dict[str, Any]]) -> int | None:
    """The rank whose own work (its step less the time it only waited in collectives) is longest by far; None if none is."""
    own = sorted(((row["own_s"], rank) for rank, row in enumerate(rows) if row["own_s"] is not None), reverse=True)
    if len(own) < 2 or own[0][0] < STRAGGLES * own[1][0]:
        return None
    return own[0][1]
