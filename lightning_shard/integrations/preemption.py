"""A job that is about to be taken down saves first, on all ranks together, and is queued again."""

import logging
import os
import re
import signal
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from lightning_shard._compat import Callback, LightningModule, Trainer
from lightning_shard.parallelize.order import HostChannel

log = logging.getLogger(__name__)

CHECKPOINT_NAME = "last-preempted.ckpt"
"""A name that ``fit(ckpt_path="last")`` looks for."""
SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


class SaveOnPreemption(Callback):
    """Save a checkpoint when the scheduler sends a signal, end the job, and under SLURM queue it again.

    The signal only sets a flag. Ranks compare flags after an optimizer step, so that they save at the same step even
    though the signal reaches them at different moments: Lightning's own handler saves from inside the signal, where
    the gathers of a sharded checkpoint meet other ranks' collectives and hang. The next run goes on with
    ``fit(ckpt_path="last")``.

    Args:
        dirpath: where to save; the folder of the Trainer's checkpoint callback by default.
        signals: that announce the end. SIGUSR1 is what ``sbatch --signal=USR1@90`` sends, SIGTERM what Kubernetes and
            SLURM send before they kill.
        every_n_steps: compare flags after as many optimizer steps; each comparison is one small all-reduce on the host,
            which does not wait for the device.
        requeue: call ``scontrol requeue`` under SLURM.

    Raises:
        SystemExit: after saving; with status 0 where the job was queued again, else 128 + the signal's number, which
            Kubernetes takes for a reason to restart.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        *,
        signals: Sequence[signal.Signals] = SIGNALS,
        every_n_steps: int = 1,
        requeue: bool = True,
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps={every_n_steps} must be 1 or more.")
        self._folder = dirpath
        self._signals = tuple(signals)
        self._every_n_steps = every_n_steps
        self._requeue = requeue
        self._received = 0
        self._compared_at = -1
        self._channel = HostChannel()
        self._before: dict[signal.Signals, Any] = {}

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Last, so that all other callbacks have seen the step that is saved.
        trainer.callbacks = [*(callback for callback in trainer.callbacks if callback is not self), self]  # type: ignore[attr-defined]

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "SaveOnPreemption was added to a Trainer that does not run in its process's main thread, which alone "
                "receives signals. Under Ray Train leave it out: Ray starts lost workers again from what they reported."
            )
        # Now, because Lightning has set its own handlers and those must not run beside ours.
        self._before = {number: signal.signal(number, self._remember) for number in self._signals}

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self._received = number

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step == self._compared_at or step % self._every_n_steps or not step:
            return
        self._compared_at = step
        number = self._highest()
        if number:
            self._leave(trainer, number)

    def _highest(self) -> int:
        """The signal that any rank has received."""
        if not dist.is_initialized():
            return self._received
        return self._channel.all_reduce([self._received], dist.ReduceOp.MAX)[0]

    def _leave(self, trainer: Trainer, number: int) -> None:
        path = os.path.join(self._where(trainer), CHECKPOINT_NAME)
        trainer.save_checkpoint(path)
        queued = self._requeue and trainer.is_global_zero and requeue_job()
        queued = trainer.strategy.broadcast(queued)
        log.warning("Saved %s on signal %s at step %d.", path, signal.Signals(number).name, trainer.global_step)
        raise SystemExit(0 if queued else 128 + number)

    def _where(self, trainer: Trainer) -> str:
        callback: Any = trainer.checkpoint_callback
        folder = self._folder or getattr(callback, "dirpath", None) or trainer.default_root_dir
        return str(folder)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._restore()

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._restore()


def requeue_job() -> bool:
    """Queue this SLURM job again; False outside of SLURM, or where ``scontrol`` refuses, which is logged."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{task}" if array else os.environ.get("SLURM_JOB_ID", "")
    if not re.fullmatch(r"\d+(_\d+)?", job):
        return False
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        log.error("Job %s was saved but not queued again: there is no scontrol on this node. Submit it again.", job)
        return False
    if done.returncode:
        log.error("Job %s was saved but not queued again: %s", job, done.stderr.strip() or done.stdout.strip())
    return done.returncode == 0
