"""All ranks go on together or stop together."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

Result = TypeVar("Result")


def on_all_ranks(action: Callable[[], Result]) -> Result:
    """The result of ``action``; where it failed on some rank, an error on every rank.

    Without this, the ranks on which it went well would wait in their next collective until a time-out.
    """
    result: Result | None = None
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:
        error = caught
    failures = _gather("" if error is None else str(error) or repr(error))
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure:
            raise RuntimeError(f"Rank {rank} failed, so every rank stops: {failure}")
    return result  # type: ignore[return-value]  # action has returned


def _gather(message: str) -> list[str]:
    if not (dist.is_available() and dist.is_initialized()):
        return [message]
    messages: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    return messages
