"""Do all ranks answer, and which do not."""

import os
import socket
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from lightning_shard._compat.groups import default_store
from lightning_shard.doctor.finding import Finding

POLL_S = 0.02


def check_ping(device: torch.device, timeout_s: float = 30.0, key: str = "ping") -> Iterator[Finding]:
    """Every rank signs in where the ranks met, then all add up one number on their devices; both within a time.

    Nothing here waits longer than ``timeout_s`` twice, whatever the process group's own time-out is.
    """
    store, rank, world = default_store(f"lightning_shard/{key}"), dist.get_rank(), dist.get_world_size()
    store.set(f"here/{rank}", f"{socket.gethostname()}, process {os.getpid()}, {device}")
    silent = _missing(store, "here", world, timeout_s)
    if silent:
        yield _finding(
            f"Of {world} ranks {_names(store, silent)} did not sign in within {timeout_s:g} s.",
            "Look at their output: they failed, or were not started.",
        )
        return
    number = torch.ones((), device=device)
    work = dist.all_reduce(number, async_op=True)
    if not _finishes(work, number, timeout_s):
        slow = _missing(store, "done", world, 0.0)
        yield _finding(
            f"All ranks are there, but a reduction did not finish within {timeout_s:g} s on {_names(store, slow)}.",
            "Name the network interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), open the ports between the nodes, and "
            "run with NCCL_DEBUG=INFO.",
        )
        return
    store.set(f"done/{rank}", "")
    if number.item() != world:
        yield _finding(
            f"A reduction over {world} ranks gave {number.item():g}.", "Do not train here: the links return wrong sums."
        )


def _finding(what: str, fix: str) -> Finding:
    return Finding(
        level="error", check="ping", what=what, why="The run would wait until the process group's time-out.", fix=fix
    )


def _missing(store: Any, prefix: str, world: int, timeout_s: float) -> list[int]:
    """Ranks without a key, after waiting for them."""
    deadline = time.monotonic() + timeout_s
    while True:
        missing = [rank for rank in range(world) if not store.check([f"{prefix}/{rank}"])]
        if not missing or time.monotonic() >= deadline:
            return missing
        time.sleep(POLL_S)


def _finishes(work: Any, number: torch.Tensor, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not work.is_completed():
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    work.wait()
    return True


def _names(store: Any, ranks: list[int]) -> str:
    known = [
        f"{rank} ({store.get(f'here/{rank}').decode()})" if store.check([f"here/{rank}"]) else str(rank)
        for rank in ranks[:8]
    ]
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank {', '.join(known)}{more}"
