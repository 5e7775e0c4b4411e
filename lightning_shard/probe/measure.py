"""Time transfers, all-gathers and all-reduces inside nodes and between them, on the process group that is there."""

import dataclasses
import datetime
import statistics
import time
from typing import Any, Literal

import torch
import torch.distributed as dist

from lightning_shard._compat import all_gather_single
from lightning_shard._compat.groups import new_group
from lightning_shard.hardware.profile import LinkProfile, Timing, fit_link
from lightning_shard.parallelize import pairs

SIZES_BYTES = (64 * 2**10, 2**20, 16 * 2**20)
"""Small enough to show latency, large enough to show bandwidth."""
REPEATS = (3, 9)
"""The fewest and the most that one measurement is repeated."""
BUDGET_S = 2.0
"""Seconds that the repeats of one measurement may take, so that a slow network does not take minutes."""

Scope = Literal["intra", "inter"]
Kind = Literal["send", "all_gather", "all_reduce"]
KINDS: tuple[Kind, ...] = ("send", "all_gather", "all_reduce")


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
            rows += [_row(scope, kind, _of_kind(scope, kind, group), size, device) for kind in KINDS]
    source = f"measured by lightning-shard probe on {datetime.date.today().isoformat()}, {dist.get_backend()}"
    return LinkProfile(
        intra=_fit("intra", rows, source, local_size),
        inter=_fit("inter", rows, source, local_size),
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
            group = new_group(ranks=ranks)  # every rank makes every group
            if rank in ranks:
                mine.append((scope, group))  # type: ignore[arg-type]
    return mine


def _of_kind(scope: Scope, kind: Kind, group: Any) -> Any:
    """Shards that lie on several nodes lie on all of their ranks: their gathers are one ring around everyone."""
    return dist.group.WORLD if scope == "inter" and kind == "all_gather" else group


def _row(scope: Scope, kind: Kind, group: Any, size: int, device: torch.device) -> dict[str, Any]:
    ranks = dist.get_world_size(group)
    share = torch.zeros(size // 4 // ranks, device=device)
    whole = torch.zeros(share.numel() * ranks, device=device)

    def once() -> float:
        """Seconds of the slowest rank, when all groups start together and share what there is to share."""
        dist.barrier()
        start = time.perf_counter()
        if kind == "send":
            _send_to_next(whole, group)
        elif kind == "all_gather":
            _gather(whole, share, group)
        else:
            dist.all_reduce(whole, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        return float(elapsed)

    once()
    fewest, most = REPEATS
    repeats = min(most, max(fewest, int(BUDGET_S / max(once(), 1e-9))))  # as many on all ranks
    seconds = statistics.median(once() for _ in range(repeats))
    return {"scope": scope, "kind": kind, "ranks": ranks, "bytes": whole.numel() * 4, "seconds": seconds}


def _gather(whole: torch.Tensor, share: torch.Tensor, group: Any) -> None:
    """As shards are gathered in a run."""
    if pairs.is_pair(group, whole.device.type):
        pairs.gather(whole, share, group).wait()
    else:
        all_gather_single(whole, share, group=group)


def _send_to_next(whole: torch.Tensor, group: Any) -> None:
    """One way only, from every other rank to the next: what a link carries with nothing coming against it."""
    position, ranks = dist.get_rank(group), dist.get_world_size(group)
    if position % 2:
        dist.recv(whole, src=dist.get_global_rank(group, position - 1), group=group)
    elif position + 1 < ranks:
        dist.send(whole, dst=dist.get_global_rank(group, position + 1), group=group)


def _fit(scope: Scope, rows: list[dict[str, Any]], source: str, local_size: int) -> Any:
    """The link of a scope. All ranks of a node talk to their equals elsewhere at the same time, so what they reach
    together is the node's: its only adapter, or the sum of one per device. A ring around everyone leaves each node once,
    so a rank's part of what it reaches there is one of as many as there are ranks.
    """
    timings = [
        Timing(
            kind=row["kind"],
            ranks=row["ranks"],
            size_bytes=row["bytes"] // (local_size if _goes_around(row, scope, local_size) else 1),
            seconds=row["seconds"],
        )
        for row in rows
        if row["scope"] == scope
    ]
    if not timings:
        return None
    link = fit_link(f"measured-{scope}", scope, timings, source=source)
    if scope == "intra":
        return link
    together = link.bytes_per_s * local_size
    return dataclasses.replace(link, bytes_per_s=together, peak_bytes_per_s=together, shared_by_node=True)


def _goes_around(row: dict[str, Any], scope: Scope, local_size: int) -> bool:
    return scope == "inter" and row["kind"] == "all_gather" and local_size > 1
