"""Find the size of a gradient reduction by trying a few in the first steps of the run itself."""

import statistics
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_shard.plans import MIB

STEPS_EACH = 4
"""Optimizer steps per size; the first, which pays for the change, is not counted."""
SIZES_MB = (1.0, 4.0, 16.0, 64.0)
CLEARLY = 0.98
"""A size replaces the one that was planned when a step takes less than this share of its time."""


class BucketTuner:
    """Tries sizes in turn and says which is the fastest; all ranks try and choose the same.

    Args:
        planned_mb: the size to beat, MiB; tried first.
        trainable_bytes: of gradients: sizes above them are the same as all in one piece.
        device: where the ranks can compare times.
    """

    def __init__(self, planned_mb: float, trainable_bytes: int, device: torch.device) -> None:
        whole_mb = trainable_bytes / MIB
        others = {size for size in (*SIZES_MB, whole_mb) if size <= whole_mb} - {planned_mb}
        self.sizes_mb: Sequence[float] = [planned_mb, *sorted(others)]
        self._device = device
        self._times: list[list[float]] = [[] for _ in self.sizes_mb]
        self._index = 0
        self._since: float | None = None
        self._left = STEPS_EACH

    @property
    def done(self) -> bool:
        """Whether every size has been tried."""
        return self._index >= len(self.sizes_mb) or len(self.sizes_mb) == 1

    def after_step(self) -> float | None:
        """Note that an optimizer step has ended; the size to use from now on where it changes."""
        now = time.perf_counter()
        if self._since is not None and self._left < STEPS_EACH:
            self._times[self._index].append(now - self._since)
        self._since = now
        self._left -= 1
        if self._left:
            return None
        self._index, self._left = self._index + 1, STEPS_EACH
        return self._choose() if self.done else self.sizes_mb[self._index]

    def _choose(self) -> float:
        """The fastest by the slowest rank's median, or the planned one unless another is clearly faster."""
        medians = torch.tensor([statistics.median(times) for times in self._times], device=self._device)
        dist.all_reduce(medians, op=dist.ReduceOp.MAX)
        self.medians_s = medians.tolist()
        best = min(range(len(self.sizes_mb)), key=self.medians_s.__getitem__)
        return self.sizes_mb[best if self.medians_s[best] < CLEARLY * self.medians_s[0] else 0]
