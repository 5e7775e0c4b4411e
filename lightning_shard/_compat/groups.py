"""Private names of torch around process groups and the store where ranks meet."""

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

GATHER_TAG, REDUCE_TAG = 0x9A12, 0x9A13
EXCHANGES = {GATHER_TAG: "all_gather", REDUCE_TAG: "reduce_scatter"}
"""Tags of messages between two ranks, a half each way, that stand for a collective, so that whoever counts collectives
counts those. Not private names: the one room that the engine and ``testing`` share with torch's groups.
"""


def default_store(prefix: str) -> Any:
    """The key-value store where the ranks of the default group met, with keys below ``prefix``.

    It is the one channel between ranks that needs no rank to be at a certain place; can go when torch hands it out.
    """
    return dist.PrefixStore(prefix, dist.distributed_c10d._get_default_store())  # type: ignore[attr-defined]


def abort_process_groups() -> None:
    """End what this process waits for in collectives, and every process group with it.

    The public ``destroy_process_group`` waits for them instead. Can go when torch makes its own abort public.
    """
    dist.distributed_c10d._abort_process_group()


def collective_timeout() -> timedelta | None:
    """How long a collective of the default group may take; None where it does not tell.

    ``new_group`` takes torch's own half hour otherwise, whatever the group of all ranks was made with. Can go when a new
    group inherits it.
    """
    group: Any = dist.group.WORLD
    if group is None:
        return None
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        found = getattr(options, "_timeout", None)
        if isinstance(found, timedelta):
            return found
    return None


def new_group(backend: str | None = None, ranks: list[int] | None = None) -> Any:
    """A group of these ranks (all by default) beside the default one, whose collectives may take as long as that one's."""
    return dist.new_group(ranks, backend=backend, timeout=collective_timeout())


def keep_timeout(mesh: DeviceMesh) -> DeviceMesh:
    """``mesh``, whose groups' collectives now may take as long as the default group's.

    A mesh takes options per backend instead, whose classes are private too. Can go when it takes a time-out.
    """
    timeout = collective_timeout()
    if timeout is not None:
        for group in mesh.get_all_groups():
            dist.distributed_c10d._set_pg_timeout(timeout, group)
    return mesh
