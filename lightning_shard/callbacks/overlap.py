"""How much of the communication hides behind compute, from torch's profiler."""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from typing_extensions import override

from lightning_shard._compat import Callback, LightningModule, Trainer

log = logging.getLogger(__name__)

COLLECTIVES = ("nccl", "gloo:", "rccl")
"""How the profiler names collectives at work: kernels on an accelerator, the transport's threads on the host."""
Span = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """Communication of one training batch on this rank, averaged over those that were profiled."""

    comm_s: float
    """Seconds in which any collective was at work."""
    hidden_s: float
    """Those of them in which this rank computed as well."""

    @property
    def exposed_s(self) -> float:
        """Seconds of communication that nothing hid."""
        return self.comm_s - self.hidden_s

    @property
    def hidden_share(self) -> float:
        """Hidden part of all communication; 1.0 where there is none."""
        return self.hidden_s / self.comm_s if self.comm_s else 1.0

    @override
    def __str__(self) -> str:
        return (
            f"communication {1e3 * self.comm_s:.2f} ms a batch, {100 * self.hidden_share:.0f} % of it behind compute, "
            f"{1e3 * self.exposed_s:.2f} ms exposed"
        )


class OverlapReport(Callback):
    """Profiles a few training batches and says how much of their communication hid behind compute.

    For every layout. What it found is in :attr:`overlap` and in rank 0's log; profiling slows the profiled batches.

    Args:
        after_batches: batches that run first, so that buckets, gathers and compiled code have settled.
        num_batches: batches to profile; a multiple of the accumulated ones to see whole optimizer steps.
    """

    def __init__(self, *, after_batches: int = 10, num_batches: int = 4) -> None:
        if after_batches < 0 or num_batches < 1:
            raise ValueError(
                f"after_batches={after_batches} must be 0 or more and num_batches={num_batches} 1 or more: the batches to "
                "skip and to profile."
            )
        self._after_batches = after_batches
        self._num_batches = num_batches
        self._seen = 0
        self._profile: profile | None = None
        self.overlap: Overlap | None = None
        """What was found; None until the batches have been profiled."""

    @override
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if self._seen == self._after_batches and self.overlap is None:
            on_device = trainer.strategy.root_device.type == "cuda"
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
            self._profile = profile(activities=activities)
            self._profile.start()

    @override
    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self._seen += 1
        if self._profile is not None and self._seen == self._after_batches + self._num_batches:
            self._stop(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._profile is not None:  # the run was shorter
            self._profile.stop()
            self._profile = None

    def _stop(self, trainer: Trainer) -> None:
        assert self._profile is not None
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        self._profile.stop()
        events = self._profile.events()  # type: ignore[no-untyped-call]
        self.overlap = find_overlap(events or (), self._num_batches)
        self._profile = None
        if trainer.is_global_zero:
            log.info("%s", self.overlap)


def find_overlap(events: Iterable[Any], num_batches: int) -> Overlap:
    """The overlap in a profile of so many batches.

    On an accelerator kernels are compared with kernels, on the host the transport's threads with operators.
    """
    events = list(events)
    on_device = [event for event in events if event.device_type.name != "CPU"]
    comm = [event for event in on_device or events if _is_collective(event.name)]
    compute = [event for event in on_device if not _is_collective(event.name)] if on_device else _operators(events)
    sent, computed = _union(map(_span, comm)), _union(map(_span, compute))
    scale = 1e-6 / num_batches
    return Overlap(comm_s=scale * _length(sent), hidden_s=scale * _length(_intersection(sent, computed)))


def _is_collective(name: str) -> bool:
    return name.lower().startswith(COLLECTIVES)


def _operators(events: list[Any]) -> list[Any]:
    return [event for event in events if event.name.startswith("aten::")]


def _span(event: Any) -> Span:
    return event.time_range.start, event.time_range.end


def _union(spans: Iterable[Span]) -> list[Span]:
    """Disjoint spans in order that cover the same moments."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _intersection(first: list[Span], second: list[Span]) -> Iterator[Span]:
    """The moments that two lists of disjoint spans, in order, have in common."""
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            yield start, end
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1


def _length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
