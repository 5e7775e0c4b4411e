"""How long optimizer steps take, on the device's own clock, without waiting for the device."""

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

KEPT = 10_000
"""Step times kept for percentiles: the latest."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Optimizer steps that were measured together."""

    times_s: tuple[float, ...]
    waits_s: float
    """Time the host waited for data in them, all together."""

    @property
    def total_s(self) -> float:
        """Of all of them."""
        return sum(self.times_s)


class StepClock:
    """Step times from marks between steps.

    On an accelerator a mark is an event in the stream: step times are then the device's, and nothing waits for it
    until :meth:`take` is called. On a host a mark is the time.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._before: Any = None
        self._pending: list[tuple[Any, bool, float]] = []
        self._taken: list[tuple[float, float]] = []
        self._wait_s = 0.0
        self._wait_from: float | None = None
        self.times_s: deque[float] = deque(maxlen=KEPT)
        """Of the latest steps that count."""

    def start(self) -> None:
        """The first step begins."""
        self._before, self._pending, self._taken = self._now(), [], []

    def mark(self, *, counts: bool) -> None:
        """A step has ended; a step that does not count (warm-up, validation in between) is left out."""
        self._pending.append((self._now(), counts, self._wait_s))
        self._wait_s = 0.0

    def wait_begins(self) -> None:
        """The host asks for the next batch."""
        self._wait_from = time.perf_counter()

    def wait_ends(self) -> None:
        """The host has it."""
        if self._wait_from is not None:
            self._wait_s += time.perf_counter() - self._wait_from
            self._wait_from = None

    def forget_wait(self) -> None:
        """What comes between is no wait for data: a validation, a checkpoint."""
        self._wait_from = None

    def take(self) -> Steps:
        """The steps that count since the last call. Waits for the device to reach the last mark."""
        if self._on_device and self._pending:
            self._pending[-1][0].synchronize()
        for mark, counts, wait_s in self._pending:
            if counts:
                self._taken.append((self._between(self._before, mark), wait_s))
            self._before = mark
        self._pending = []
        taken, self._taken = self._taken, []
        self.times_s.extend(step_s for step_s, _ in taken)
        return Steps(tuple(step_s for step_s, _ in taken), sum(wait_s for _, wait_s in taken))

    def _now(self) -> Any:
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()  # type: ignore[no-untyped-call]
        return event

    def _between(self, before: Any, after: Any) -> float:
        seconds: float = before.elapsed_time(after) / 1e3 if self._on_device else after - before
        return seconds


def percentile(times_s: "deque[float] | list[float]", share: float) -> float | None:
    """The time that ``share`` of the steps stay below or at; None without any."""
    ordered = sorted(times_s)
    return ordered[round(share * (len(ordered) - 1))] if ordered else None
