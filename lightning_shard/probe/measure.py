"""Time all-gathers and all-reduces inside nodes and between them, on the process group that is there."""

import datetime
import statistics
import time
from typing import Any, Literal

import torch
import torch.distributed as dist

from lightning_shard._compat import all_gather_single
from lightning_shard.hardware.profile import LinkProfile, fit_link

SIZES_BYTES = (64 * 2**10, 2**20, 16 * 2**20)
"""Small enough to show latency, large enough to show bandwidth."""
REPEATS = 7
WARM_UP = 2

Scope = Literal["intra", "inter"]


def measure_links(local_size: int, device: torch.device, sizes_bytes: tuple[int, ...] = SIZES_BYTES) -> LinkProfile:
    """The links of the default process group. A collective: every rank must call it.

    Args:
        local_size: ranks per node; ranks of one node follow each other.
        device: where this rank's tensors live.
        sizes_bytes: bytes of the whole, gathered side of each collective.

    Returns:
        The same profile on every rank: a ring is as slow as its slowest member.
    """
    world = dist.get_world_size()
    rows: list[dict[str, Any]] = []
    for scope, group in _groups(world, local_size):
        if group is None or dist.get_world_size(group) == 1:
            continue
        for size in sizes_bytes:
            rows += [_row(scope, name, group, size, device) for name in ("all_gather", "all_reduce")]
    rows = _slowest(rows)
    source = f"measured by lightning-shard probe on {datetime.date.today().isoformat()}, {dist.get_backend()}"
    links = {scope: _fit(scope, rows, source) for scope in ("intra", "inter")}
    return LinkProfile(
        **links,
        backend=str(dist.get_backend()),
        world_size=world,
        date=datetime.date.today().isoformat(),
        timings=tuple(rows),
    )


def _groups(world: int, local_size: int) -> list[tuple[Scope, dist.ProcessGroup | None]]:
    """This rank's group inside its node, and the one with its equals on the other nodes."""
    rank = dist.get_rank()
    nodes = [list(range(start, start + local_size)) for start in range(0, world, local_size)]
    equals = [list(range(first, world, local_size)) for first in range(local_size)]
    mine: list[tuple[Scope, dist.ProcessGroup | None]] = []
    for scope, partition in (("intra", nodes), ("inter", equals)):
        for ranks in partition:
            group = dist.new_group(ranks)  # every rank makes every group
            if rank in ranks:
                mine.append((scope, group))  # type: ignore[arg-type]
    return mine


def _row(scope: Scope, name: str, group: Any, size: int, device: torch.device) -> dict[str, Any]:
    ranks = dist.get_world_size(group)
    share = torch.zeros(size // 4 // ranks, device=device)
    whole = torch.zeros(share.numel() * ranks, device=device)
    times = []
    for _ in range(WARM_UP + REPEATS):
        dist.barrier(group)
        start = time.perf_counter()
        if name == "all_gather":
            all_gather_single(whole, share, group=group)
        else:
            dist.all_reduce(whole, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    seconds = statistics.median(times[WARM_UP:])
    return {"scope": scope, "collective": name, "ranks": ranks, "bytes": whole.numel() * 4, "seconds": seconds}


def _slowest(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each measurement at its slowest rank's time."""
    everyone: list[list[dict[str, Any]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, rows)
    return [
        {**same[0], "seconds": max(row["seconds"] for row in same)}
        for same in zip(*(rows for rows in everyone if rows), strict=False)
    ]


def _fit(scope: str, rows: list[dict[str, Any]], source: str) -> Any:
    timings = [
        (1 if row["collective"] == "all_gather" else 2, row["ranks"], row["bytes"], row["seconds"])
        for row in rows
        if row["scope"] == scope
    ]
    return fit_link(f"measured-{scope}", scope, timings, source=source) if timings else None
