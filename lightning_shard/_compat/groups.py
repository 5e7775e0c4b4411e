"""Private names of torch around process groups and the store where ranks meet."""

from typing import Any

import torch.distributed as dist


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
