"""How much of the communication hides behind compute, from torch's profiler."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from lightning_shard._compat import Callback, LightningModule, Trainer
from lightning_shard.callbacks.window import Communication, ProfilerWindow, sort_events, summarize

log = logging.getLogger(__name__)


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
        self._window: ProfilerWindow | None = None
        self.overlap: Overlap | None = None
        """What was found; None until the batches have been profiled."""

    @override
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if self._seen == self._after_batches and self.overlap is None:
            window = ProfilerWindow(trainer.strategy.root_device)
            if window.open():
                self._window = window
            else:
                log.warning("Another profiler is at work: how communication overlaps is not reported.")

    @override
    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self._seen += 1
        if self._window is not None and self._seen == self._after_batches + self._num_batches:
            self._stop(trainer)

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._window is not None:  # the run was shorter
            self._window.abandon()
            self._window = None

    def _stop(self, trainer: Trainer) -> None:
        assert self._window is not None
        self.overlap = average(self._window.close(), self._num_batches)
        self._window = None
        if trainer.is_global_zero:
            log.info("%s", self.overlap)


def find_overlap(events: Iterable[Any], num_batches: int) -> Overlap:
    """The overlap in a profile of so many batches: kernels against kernels where there are any, else host operators."""
    events = list(events)
    on_device = any(event.device_type.name != "CPU" for event in events)
    return average(summarize(*sort_events(events, on_device=on_device)), num_batches)


def average(seen: Communication, num_batches: int) -> Overlap:
    """One batch's share of what was seen in so many."""
    return Overlap(comm_s=seen.comm_s / num_batches, hidden_s=(seen.comm_s - seen.exposed_s) / num_batches)
