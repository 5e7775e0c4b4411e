"""Training batches under torch's profiler: how much of it is communication, and how much of that nothing hides."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from lightning_shard._compat.profiling import plain_events, profiler_is_running, quiet_profiler

Interval = tuple[float, float]
"""Start and end, in seconds."""

MOST_SHOWN = 400
"""Intervals of each lane kept for the picture."""
COMMUNICATION = ("nccl", "rccl", "gloo:")
"""What the names of collectives begin with or hold: NCCL's and RCCL's kernels, gloo's transfers."""


@dataclass(frozen=True, slots=True)
class Communication:
    """What one profiled step did."""

    window_s: float
    """All of it, with what the host did before the first operation and after the last (a slow data transform, a sleep)."""
    comm_s: float
    """Time in which at least one collective was under way."""
    exposed_s: float
    """Part of it in which nothing was computed."""
    lanes: dict[str, list[Interval]] = field(default_factory=dict)
    """Intervals of computation and communication, from the start of the step."""

    @property
    def comm_share(self) -> float:
        """Share of the step."""
        return self.comm_s / self.window_s if self.window_s else 0.0

    @property
    def exposed_share(self) -> float:
        """Share of the step in which the device only communicated."""
        return self.exposed_s / self.window_s if self.window_s else 0.0

    @property
    def own_s(self) -> float:
        """The step less what only communicated: what this rank needs by itself, and how a straggler is found."""
        return self.window_s - self.exposed_s


class ProfilerWindow:
    """Profiles from :meth:`open` to :meth:`close`."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type == "cuda"
        self._profile: profile | None = None
        self._opened_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether a step is being profiled."""
        return self._profile is not None

    def open(self) -> bool:
        """Begin, unless another profiler is at work."""
        if profiler_is_running():
            return False
        if self._on_device:
            torch.cuda.synchronize()
        activity = ProfilerActivity.CUDA if self._on_device else ProfilerActivity.CPU
        quiet_profiler()
        self._profile = profile(activities=[activity])
        self._profile.start()
        self._opened_s = time.perf_counter()
        return True

    def close(self) -> Communication:
        """End, and say what was seen."""
        assert self._profile is not None
        if self._on_device:
            torch.cuda.synchronize()
        window_s = time.perf_counter() - self._opened_s
        self._profile.stop()
        compute, communication = sort_events(plain_events(self._profile), on_device=self._on_device)
        self._profile = None
        return summarize(compute, communication, window_s=window_s)

    def abandon(self) -> None:
        """End without an answer, after an error."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None


def sort_events(events: Iterable[Any], *, on_device: bool) -> tuple[list[Interval], list[Interval]]:
    """Intervals of computation and of communication among a profiler's events.

    On an accelerator these are kernels and copies; on a host operators, and the transfers of gloo's threads.
    """
    compute: list[Interval] = []
    communication: list[Interval] = []
    for event in events:
        if on_device == (event.device_type.name == "CPU"):
            continue
        interval = (event.time_range.start / 1e6, event.time_range.end / 1e6)
        if any(mark in event.name.lower() for mark in COMMUNICATION):
            communication.append(interval)
        elif on_device or event.name.startswith("aten::"):
            compute.append(interval)
    return compute, communication


def summarize(
    compute: Sequence[Interval], communication: Sequence[Interval], *, window_s: float | None = None
) -> Communication:
    """Shares and lanes from raw intervals.

    Args:
        compute: when something was computed.
        communication: when a collective was under way.
        window_s: how long was looked; from the first interval to the last if not given.
    """
    computing, communicating = union(compute), union(communication)
    everything = union([*computing, *communicating])
    if not everything:
        return Communication(window_s or 0.0, 0.0, 0.0)
    start, end = everything[0][0], everything[-1][1]
    comm_s = _length(communicating)
    hidden_s = _length(computing) + comm_s - _length(everything)
    lanes = {"compute": computing, "communication": communicating}
    return Communication(
        window_s=max(window_s or 0.0, end - start),
        comm_s=comm_s,
        exposed_s=max(0.0, comm_s - hidden_s),
        lanes={name: _few([(a - start, b - start) for a, b in lane]) for name, lane in lanes.items()},
    )


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as intervals that neither touch nor overlap."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _few(lane: list[Interval]) -> list[Interval]:
    """At most :data:`MOST_SHOWN` intervals: the narrowest gaps are drawn over."""
    while len(lane) > MOST_SHOWN:
        gaps = sorted(after[0] - before[1] for before, after in zip(lane, lane[1:], strict=False))
        gap = gaps[len(gaps) // 2]
        joined: list[Interval] = [lane[0]]
        for start, end in lane[1:]:
            if start - joined[-1][1] <= gap:
                joined[-1] = (joined[-1][0], end)
            else:
                joined.append((start, end))
        lane = joined
    return [(round(start, 7), round(end, 7)) for start, end in lane]
