"""Signals and failures: all ranks leave training after the same batch, with one checkpoint, or learn who failed."""

import logging
import os
import signal
import threading
from functools import partial
from typing import Any

import torch.distributed as dist
from typing_extensions import override

from lightning_shard._compat import DDPStrategy, Trainer, TrainerFn
from lightning_shard._compat.groups import default_store
from lightning_shard._compat.trainer import (
    SIGTERMException,
    hand_back_loop,
    model_checkpoints,
    saves_on_exception,
    take_over_loop,
    take_over_signals,
)
from lightning_shard.strategies.meeting import launcher_hosts_store, within
from lightning_shard.strategies.watch import Watch

log = logging.getLogger(__name__)

ANSWER_S = 5.0
"""How long a rank that failed waits for what the store says of the others."""
STOPPED = "last-stopped.ckpt"
"""The checkpoint of a run that was asked to stop; ``fit(ckpt_path="last")`` finds it by this name."""


class StoppableStrategy(DDPStrategy):
    """Stops all ranks together for SIGTERM or SIGINT on any, and for SLURM's requeue signal."""

    _watch: Watch | None = None
    _num_watches = 0
    _early: int | None = None
    """A signal that came before training began."""
    _requeue: Any = None
    """Lightning's handler of SLURM's requeue signal, to be called by all ranks together."""
    _requeued = False

    def watch_signals(self, trainer: Trainer) -> None:
        """Have signals only noted from now on; called once per fit, before Lightning registers its handlers."""
        self._early, self._requeued = None, False
        self._requeue = take_over_signals(trainer, terminate=self._on_terminate, requeue=self._on_requeue)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        trainer = self._trainer()
        store = default_store(f"lightning_shard/watch/{self._num_watches}") if self.world_size > 1 else None
        self._num_watches += 1
        self._watch = Watch(store, self.global_rank, self.world_size)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._on_interrupt)  # Lightning puts the user's back when the run ends
        if self._early is not None:
            self._watch.request(self._early)
        take_over_loop(trainer, self._before_batch)
        self._watch.start()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._end_watch()

    @override
    def on_exception(self, exception: BaseException) -> None:
        watch = self._watch
        if watch is not None and not isinstance(exception, SIGTERMException):
            self._explain(watch, exception)
        self._end_watch()
        super().on_exception(exception)

    def _explain(self, watch: Watch, exception: BaseException) -> None:
        """Say what the error of a broken connection or a time-out does not: whose fault it was."""
        keeper = "The launcher, which keeps the ranks' store," if launcher_hosts_store() else "Rank 0"
        try:
            notes = within(ANSWER_S, partial(watch.explain, exception))
        except TimeoutError:  # a store whose process is stopped answers nothing, not even that
            notes = [f"{keeper} has not answered for {watch.unanswered_s():.0f} s."]
        except (dist.DistError, ConnectionError):
            notes = [f"{keeper} has ended: look at its output for the cause."]
        for note in notes:
            log.error(note)
            if hasattr(exception, "add_note"):
                exception.add_note(note)

    def _end_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.end()
            hand_back_loop(self._trainer())

    # --- signals: only noted, by whichever rank gets them -------------------------------------------------

    def _on_terminate(self, number: int, _: Any) -> None:
        first = self._watch is None or not self._watch.requested
        if self.launcher is not None and first:
            self.launcher.kill(number)
        if self._trainer().state.fn != TrainerFn.FITTING:
            raise SIGTERMException(128 + number)
        self._note(number)

    def _on_requeue(self, number: int, _: Any) -> None:
        self._note(number)

    def _on_interrupt(self, number: int, frame: Any) -> None:
        log.warning("Interrupted: all ranks stop after a batch and save. Press Ctrl+C again to stop at once.")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._note(number)

    def _note(self, number: int) -> None:
        if self._watch is None:
            self._early = number
        else:
            self._watch.request(number)

    # --- between batches, on all ranks at once --------------------------------------------------------------

    def _before_batch(self) -> None:
        number = self._watch.at_batch() if self._watch is not None else None
        if number is None:
            return
        if number in (signal.SIGTERM, signal.SIGINT):
            self._save_and_leave(number)
        if not self._requeued:  # the signal may come to every rank, at different moments
            self._requeued = True
            self._requeue(number, None)

    def _save_and_leave(self, number: int) -> None:
        trainer = self._trainer()
        name = signal.Signals(number).name
        callbacks = model_checkpoints(trainer)
        if callbacks and not saves_on_exception(trainer):
            path: str = self.broadcast(os.path.join(str(callbacks[0].dirpath), STOPPED))
            trainer.save_checkpoint(path)
            self.wait_for_save()
            if self.is_global_zero:
                log.warning(
                    f"{name}: stopped at step {trainer.global_step}, saved {path}. Go on with ckpt_path='last'."
                )
        raise SIGTERMException(128 + number)

    def wait_for_save(self) -> None:
        """Wait for a save in the background."""

    def _trainer(self) -> Trainer:
        assert self.lightning_module is not None
        return self.lightning_module.trainer
