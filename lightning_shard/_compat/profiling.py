"""Private names of torch's profiler."""

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import profile


def profiler_is_running() -> bool:
    """Whether a profiler is at work in this thread: a second one would fail. Private until torch has a question for it."""
    return bool(torch._C._autograd._profiler_enabled())


def quiet_profiler() -> None:
    """Keep torch's profiler from writing two lines to the error stream per use, unless the user asked for its messages.

    Kineto reads its level when it is first used. Can go when torch does not print at its default level.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


@dataclass(frozen=True, slots=True)
class PlainEvent:
    """One event as the profiler recorded it, times in microseconds."""

    name: str
    device_type: Any
    time_range: Any


@dataclass(frozen=True, slots=True)
class TimeRange:
    """Microseconds of the profiler's clock."""

    start: float
    end: float


def plain_events(finished: profile) -> list[PlainEvent]:
    """What a profile recorded, without the tree of calls that ``events()`` builds: that takes longer than the step.

    Can go when the public ``events()`` gives plain events as fast.
    """
    results: Any = getattr(finished.profiler, "kineto_results", None)
    if results is None:
        return []
    return [
        PlainEvent(each.name(), each.device_type(), TimeRange(each.start_ns() / 1e3, each.end_ns() / 1e3))
        for each in results.events()
    ]
