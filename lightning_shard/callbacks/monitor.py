"""ShardMonitor: what the plan promised against what the run measured."""

import json
import logging
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from lightning_shard._compat import Callback, LightningModule, Trainer
from lightning_shard.specs import format_bytes

log = logging.getLogger(__name__)

FORMAT = 1


class ShardMonitor(Callback):
    """Measures step time and peak memory, says once how they compare with the estimate, and keeps both.

    The file holds plan, estimate and measurement; ``lightning-shard plan --calibrate FILE`` reads it.

    Args:
        path: of the file; ``shard_monitor.json`` in the Trainer's root folder by default.
        warm_up: optimizer steps left out at the start (first gathers, first optimizer state, compilation).
        report_after: optimizer steps after which the summary line is logged.
    """

    def __init__(self, path: str | None = None, *, warm_up: int = 3, report_after: int = 10) -> None:
        if warm_up < 1 or report_after <= warm_up:
            raise ValueError(f"warm_up={warm_up} must be 1 or more, and report_after={report_after} larger than it.")
        self._path = path
        self._warm_up = warm_up
        self._report_after = report_after
        self._ends: list[float] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._ends = []
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        steps = trainer.global_step
        if steps <= len(self._ends):
            return  # a micro-batch before the last one of its step
        self._ends.append(time.perf_counter())
        if steps == self._report_after:
            log.info(self.summary(trainer))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        record = self.record(trainer)
        if trainer.is_global_zero:
            path = Path(self._path or os.path.join(trainer.default_root_dir, "shard_monitor.json"))
            path.parent.mkdir(parents=True, exist_ok=True)
            aside = path.with_name(f"{path.name}.part")
            aside.write_text(json.dumps(record, indent=2) + "\n")
            aside.replace(path)

    def record(self, trainer: Trainer) -> dict[str, Any]:
        """Plan, estimate and measurement. A collective: the peak is the largest of all ranks."""
        strategy = trainer.strategy
        plan, estimate = getattr(strategy, "plan", None), getattr(strategy, "estimate", None)
        return {
            "format": FORMAT,
            "plan": None if plan is None else plan.to_dict(),
            "estimate": None if estimate is None else estimate.to_dict(),
            "measured": {"steps": len(self._ends), **self._step_times(), **_peaks(trainer)},
        }

    def summary(self, trainer: Trainer) -> str:
        """One line: predicted against measured."""
        record = self.record(trainer)
        measured, estimate = record["measured"], record["estimate"] or {}
        parts = [_compare("step", measured["step_s"], estimate.get("step_s"), lambda s: f"{s * 1e3:,.0f} ms")]
        for name in ("allocated_bytes", "reserved_bytes"):
            if measured[name] is not None:
                parts.append(_compare(name.split("_")[0], measured[name], estimate.get(name), format_bytes))
        return "ShardMonitor: " + ", ".join(parts)

    def _step_times(self) -> dict[str, float | None]:
        ends = self._ends[self._warm_up - 1 :]
        times = [later - sooner for sooner, later in zip(ends, ends[1:], strict=False)]
        if not times:
            return {"step_s": None, "step_p90_s": None}
        ordered = sorted(times)
        return {"step_s": statistics.median(times), "step_p90_s": ordered[int(0.9 * (len(ordered) - 1))]}


def _peaks(trainer: Trainer) -> dict[str, int | None]:
    """The largest peaks of all ranks, in bytes; None on a host, which keeps no such statistics."""
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return {"allocated_bytes": None, "reserved_bytes": None}
    mine = [torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)]
    peaks = trainer.strategy.reduce(torch.tensor(mine, device=device), reduce_op="max")
    allocated, reserved = (int(value) for value in peaks.tolist())
    return {"allocated_bytes": allocated, "reserved_bytes": reserved}


def _compare(name: str, measured: Any, predicted: Any, show: Any) -> str:
    if measured is None:
        return f"{name} not measured yet"
    if not predicted:
        return f"{name} {show(measured)}"
    return f"{name} {show(measured)} ({measured / predicted - 1:+.0%} against {show(predicted)} predicted)"
