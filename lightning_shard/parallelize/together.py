"""All ranks go on together or stop together."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

Result = TypeVar("Result")


def on_all_ranks(action: Callable[[], Result], group: dist.ProcessGroup | None = None) -> Result:
    """The result of ``action``; where it failed on some rank, an error on every rank.

    Without this, the ranks on which it went well would wait in their next collective until a time-out.

    Args:
        action: what every rank of the group does.
        group: who must agree; everyone by default.
    """
    result: Result | None = None
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:
        error = caught
    failures = gather("" if error is None else str(error) or repr(error), group)
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure:
            raise RuntimeError(f"Rank {rank} failed, so every rank stops: {failure}")
    return result  # type: ignore[return-value]  # action has returned


def gather(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The values of all ranks of ``group``, on all of them; just ours where there is no process group."""
    if not (dist.is_available() and dist.is_initialized()):
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def rank_in(group: dist.ProcessGroup | None = None) -> int:
    """This rank within ``group``; 0 where there is no process group."""
    return dist.get_rank(group) if dist.is_available() and dist.is_initialized() else 0


def size_of(group: dist.ProcessGroup | None = None) -> int:
    """The number of ranks in ``group``; 1 where there is no process group."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
