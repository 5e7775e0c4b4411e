"""ShardMonitor: what the plan promised against what the run measured."""

import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_shard._compat import Callback, LightningModule, Trainer, TrainerFn, rank_zero_info
from lightning_shard._compat.trainer import num_data_ranks
from lightning_shard.callbacks.across_ranks import gather, largest, straggler
from lightning_shard.callbacks.batch_size import Work
from lightning_shard.callbacks.clock import StepClock, percentile
from lightning_shard.callbacks.flops import flops_per_token, peak_flops
from lightning_shard.callbacks.gradient_norm import gradient_norm
from lightning_shard.callbacks.measured_memory import at_rest, compare, peaks
from lightning_shard.callbacks.summary import summarize
from lightning_shard.callbacks.window import Communication, ProfilerWindow
from lightning_shard.report.record import FILE_NAME, RunRecord

LOSSES = ("train_loss", "train/loss", "loss")
"""Names under which modules log their training loss; the step's output where none is there."""


class ShardMonitor(Callback):
    """Measures a run, logs to whatever loggers it has, and says how it compares with the estimate.

    Every ``Trainer(log_every_n_steps)`` optimizer steps it logs loss, tokens per second (in all and per device), MFU,
    step time, data wait, communication and exposed communication, gradient norm, memory and the straggler, all under
    ``monitor/``. Once, after ``report_after`` steps, it logs one line: predicted against measured. It keeps all of it in
    a file that ``lightning-shard report`` draws and ``lightning-shard plan --calibrate`` reads.

    Between those moments nothing waits for the device and no rank for another: times come from events in the stream.
    Communication is seen by profiling one step now and then; that step counts in no step time.

    Args:
        path: of the file; ``shard_monitor.json`` in the Trainer's root folder by default.
        warm_up: optimizer steps left out at the start (first gathers, first optimizer state, compilation).
        report_after: optimizer steps after which the summary line is logged.
        profile_every: optimizer steps from one profiled step to the next; 0 profiles none.
    """

    def __init__(
        self, path: str | None = None, *, warm_up: int = 3, report_after: int = 10, profile_every: int = 500
    ) -> None:
        if warm_up < 1 or report_after <= warm_up:
            raise ValueError(f"warm_up={warm_up} must be 1 or more, and report_after={report_after} larger than it.")
        if profile_every < 0:
            raise ValueError(f"profile_every={profile_every} is a number of steps: give 1 or more, or 0 for none.")
        self._path = path
        self._warm_up = warm_up
        self._report_after = report_after
        self._profile_every = profile_every
        self._begin(torch.device("cpu"), 0)

    def _begin(self, device: torch.device, step: int) -> None:
        self._device = device
        self._clock = StepClock(device)
        self._window = ProfilerWindow(device)
        self._seen: Communication | None = None
        self._work, self._step_work = Work(), Work()
        self._counted = self._positions = 0
        self._flops_per_token = 0
        self._peak_flops: float | None = None
        self._first_step = self._last_step = step
        self._since = time.perf_counter()
        self._interrupted = False
        self._loss: Tensor | None = None
        self.record = RunRecord()
        """What is known of the run so far, and what the file holds."""

    @property
    def steps(self) -> int:
        """Optimizer steps of this fit."""
        return self._last_step - self._first_step

    # --- hooks ---------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        self._begin(strategy.root_device, trainer.global_step)
        plan, estimate = getattr(strategy, "plan", None), getattr(strategy, "estimate", None)
        self.record.plan = None if plan is None else plan.to_dict()
        self.record.estimate = None if estimate is None else estimate.to_dict()
        self.record.run = {
            "strategy": type(strategy).__name__,
            "world_size": trainer.world_size,
            "num_nodes": trainer.num_nodes,
            "device": _device_name(self._device),
            "precision": str(trainer.precision),
            "accumulate": trainer.accumulate_grad_batches,
            "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        self._flops_per_token = flops_per_token(pl_module)
        self._peak_flops = peak_flops(self._device, str(trainer.precision))
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        self._clock.start()
        self._clock.wait_begins()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._clock.wait_ends()
        self._step_work.add(batch)
        if self._is_due(trainer.global_step + 1) and not self._window.is_open:
            self._window.open()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self._loss = loss if isinstance(loss, Tensor) else None
        if trainer.global_step > self._last_step:  # else a micro-batch before the last one of its step
            self._end_step(trainer, pl_module)
        self._clock.wait_begins()

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._interrupt()

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or trainer.state.fn != TrainerFn.FITTING:
            return
        values = {name: float(value) for name, value in trainer.callback_metrics.items() if "val" in name}
        self.record.validation.append({"step": trainer.global_step, **values})

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        self._interrupt()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._flush(trainer, pl_module)
        self._write(trainer)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._window.abandon()
        if self.steps:
            self._write(trainer)  # what was known at the last log: nothing here may wait for another rank

    # --- steps ---------------------------------------------------------------------------------------

    def _is_due(self, step: int) -> bool:
        """Whether this optimizer step, counted from 1, is to be profiled."""
        if not self._profile_every:
            return False
        own = step - self._first_step
        early = self._warm_up + 1 if self._report_after > self._warm_up + 1 else self._report_after + 1
        return own == early or (own > self._report_after and step % self._profile_every == 0)

    def _interrupt(self) -> None:
        self._interrupted = True
        self._clock.forget_wait()

    def _end_step(self, trainer: Trainer, module: LightningModule) -> None:
        self._last_step = trainer.global_step
        profiled = self._window.is_open
        counts = self.steps > self._warm_up and not self._interrupted and not profiled
        self._clock.mark(counts=counts)
        if counts:
            self._work.merge(self._step_work)
            self._counted += 1
            self._positions += self._step_work.positions
        self._step_work = Work()
        self._interrupted = False
        if profiled:
            self._seen = self._window.close()
            self._interrupted = True  # what follows is no part of a step
        first = self.steps == self._report_after
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set from another class
        if self._last_step % every == 0 or profiled or first:
            self._log(trainer, self._flush(trainer, module))
            self._interrupted = True
        if first:
            rank_zero_info(f"ShardMonitor: {summarize(self.record.measured, self.record.estimate or {})}")
        if first or profiled:
            self._write(trainer)

    def _flush(self, trainer: Trainer, module: LightningModule) -> dict[str, Any]:
        """Read what has been measured since the last time, gather it, and add a row to the history. A collective."""
        taken, (samples, tokens) = self._clock.take(), self._work.take()
        times = self._clock.times_s
        rows = gather(
            {
                "loss": self._read_loss(trainer),
                "samples": samples,
                "tokens": tokens,
                "positions": self._positions / self._counted if self._counted else None,
                "total_s": taken.total_s or None,
                "wait_s": taken.waits_s,
                "step_s": percentile(list(taken.times_s), 0.5),
                **{f"run_step_p{p}_s": percentile(times, p / 100) for p in (50, 90, 99)},
                **peaks(self._device),
                "comm_share": self._seen.comm_share if self._seen else None,
                "exposed_comm_share": self._seen.exposed_share if self._seen else None,
                "own_s": self._seen.own_s if self._seen else None,
            },
            self._device,
        )
        row = self._row(trainer, module, rows)
        self.record.ranks = [{"rank": rank, **figures} for rank, figures in enumerate(rows)]
        self._update(trainer, module, rows, row)
        if not self.record.history or self.record.history[-1]["step"] < self._last_step:
            self.record.add(row)
        return row

    def _row(self, trainer: Trainer, module: LightningModule, rows: list[dict[str, Any]]) -> dict[str, Any]:
        losses = [row["loss"] for row in rows if row["loss"] is not None]
        slowest_s = largest(rows, "total_s")
        copies = trainer.world_size / num_data_ranks(trainer)  # ranks that share a batch have each counted it
        tokens, samples = (sum(row[name] for row in rows) / copies for name in ("tokens", "samples"))
        per_s = tokens / slowest_s if slowest_s and tokens else None
        return {
            "step": self._last_step,
            "time_s": round(time.perf_counter() - self._since, 3),
            "loss": sum(losses) / len(losses) if losses else None,
            "step_s": largest(rows, "step_s"),
            "step_p90_s": largest(rows, "run_step_p90_s"),
            "tokens_per_s": per_s,
            "tokens_per_s_per_device": None if per_s is None else per_s / trainer.world_size,
            "samples_per_s": samples / slowest_s if slowest_s else None,
            "mfu": self._mfu(per_s, trainer.world_size),
            "data_wait_share": largest(rows, "wait_s") / slowest_s if slowest_s else None,  # type: ignore[operator]
            "comm_share": largest(rows, "comm_share"),
            "exposed_comm_share": largest(rows, "exposed_comm_share"),
            "grad_norm": gradient_norm(trainer, module),
            "allocated_bytes": largest(rows, "allocated_bytes"),
            "reserved_bytes": largest(rows, "reserved_bytes"),
            "straggler_rank": straggler(rows),
        }

    def _update(
        self, trainer: Trainer, module: LightningModule, rows: list[dict[str, Any]], row: dict[str, Any]
    ) -> None:
        """The record's figures of the whole run."""
        kept = ("tokens_per_s", "mfu", "data_wait_share", "comm_share", "exposed_comm_share", "straggler_rank")
        before = self.record.measured
        self.record.measured = {
            "steps": self.steps,
            "step_s": largest(rows, "run_step_p50_s"),
            "step_p90_s": largest(rows, "run_step_p90_s"),
            "step_p99_s": largest(rows, "run_step_p99_s"),
            "batch_fill": self._fill(trainer, largest(rows, "positions")),
            "allocated_bytes": _whole(row["allocated_bytes"]),
            "reserved_bytes": _whole(row["reserved_bytes"]),
            **{name: before.get(name) if row[name] is None else row[name] for name in kept},
        }
        offload = getattr(getattr(trainer.strategy, "plan", None), "offload", "none")
        rest = at_rest(module, trainer.optimizers, offload=offload)
        self.record.memory = compare(rest, peaks(self._device), self.record.estimate or {})
        if self._seen is not None:
            self.record.window = {
                "step": self._last_step,
                "window_s": self._seen.window_s,
                "comm_s": self._seen.comm_s,
                "exposed_s": self._seen.exposed_s,
                "lanes": self._seen.lanes,
            }

    def _fill(self, trainer: Trainer, positions: float | None) -> float | None:
        """Positions of a step of one rank, of those that were planned for; None where either is not known."""
        estimate = self.record.estimate
        planned = estimate["tokens_per_s"] * estimate["step_s"] / num_data_ranks(trainer) if estimate else 0
        return positions / planned if positions and planned else None

    def _mfu(self, tokens_per_s: float | None, world_size: int) -> float | None:
        """Share of the devices' peak that the model's own FLOPs reach; None on a host and without tokens."""
        if tokens_per_s is None or self._device.type == "cpu":
            return None
        estimate = self.record.estimate
        if estimate and estimate["mfu"] and estimate["tokens_per_s"]:
            return float(tokens_per_s * estimate["mfu"] / estimate["tokens_per_s"])
        return tokens_per_s * self._flops_per_token / (self._peak_flops * world_size) if self._peak_flops else None

    def _read_loss(self, trainer: Trainer) -> float | None:
        metrics = trainer.callback_metrics
        named = next((metrics[name] for name in LOSSES if name in metrics), None)
        if named is not None:
            return float(named)
        return None if self._loss is None else float(self._loss) * trainer.accumulate_grad_batches

    def _log(self, trainer: Trainer, row: dict[str, Any]) -> None:
        values = {f"monitor/{name}": float(v) for name, v in row.items() if v is not None and name != "step"}
        for logger in trainer.loggers:
            logger.log_metrics(values, step=self._last_step)

    def _write(self, trainer: Trainer) -> None:
        if trainer.is_global_zero:
            self.record.write(Path(self._path or os.path.join(trainer.default_root_dir, FILE_NAME)))


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
