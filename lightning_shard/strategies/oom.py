"""Out of memory in the first steps: all ranks leave the step together, take a leaner plan, and do the step again.

A rank that runs out of memory in the middle of a step leaves the others waiting in a collective. So during the first
optimizer steps every rank watches a flag in the store where the ranks met; when it goes up, each aborts its process
groups, which ends what it waits for. Before any optimizer updates, all ranks vote that they came through backward. Until
then no weight has changed, so nothing is lost: gradients are made again from the same batches and the same random state.
The first update makes the optimizer's state and may be what runs out, on one rank after others are through: what it
changes is copied to the host before it and put back, and all ranks vote again after each update.
"""

import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.optim import Optimizer

from lightning_shard._compat import (
    LightningModule,
    Trainer,
    rank_zero_info,
    run_micro_batch,
)
from lightning_shard._compat.groups import abort_process_groups, default_store
from lightning_shard._compat.sharded import scaler_before_step
from lightning_shard.doctor.replicas import Prints, fingerprints
from lightning_shard.parallelize.together import gather
from lightning_shard.specs import format_bytes
from lightning_shard.strategies.meeting import open_group
from lightning_shard.strategies.oom_update import BeforeUpdate, changed_bytes

POLL_S = 0.02
LEAVE_S = 120.0
"""For all ranks to leave a step that one of them could not finish."""

_fits = 0
"""Runs guarded so far in this process: the same number on all ranks, so that keys in the store differ."""


class PeerOutOfMemory(RuntimeError):
    """Another rank ran out of memory in this step."""


@dataclass(slots=True)
class Window:
    """The optimizer step in progress, with what is needed to do it again."""

    batches: list[tuple[int, Any]] = field(default_factory=list)
    prints: Prints = field(default_factory=dict)
    attributes: dict[str, Any] = field(default_factory=dict)
    buffers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    restore_scaler: Callable[[], None] = lambda: None
    random_state: Tensor | None = None
    device_random_state: Tensor | None = None

    @classmethod
    def open(cls, module: LightningModule, device: torch.device) -> "Window":
        """Before the first micro-batch of a step."""
        scaler = getattr(module.trainer.precision_plugin, "scaler", None)
        plain = (int, float, str, Tensor, type(None))
        return cls(
            prints=fingerprints(module),
            attributes={name: value for name, value in vars(module).items() if isinstance(value, plain)},
            buffers=[(buffer, buffer.clone()) for buffer in module.buffers() if not buffer.is_meta],
            restore_scaler=(lambda: None) if scaler is None else scaler_before_step(scaler),
            random_state=torch.get_rng_state(),
            device_random_state=torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        )

    def updated(self, module: LightningModule) -> bool:
        """Whether an optimizer has already changed a weight."""
        return fingerprints(module) != self.prints

    def restore(self, module: LightningModule, device: torch.device) -> None:
        """As it was before the step, under whatever layout: what the module counted, its buffers, and the random state."""
        self.prints = fingerprints(module)
        vars(module).update(self.attributes)
        with torch.no_grad():
            for buffer, before in self.buffers:
                buffer.copy_(before)
        assert self.random_state is not None
        torch.set_rng_state(self.random_state)
        if self.device_random_state is not None:
            torch.cuda.set_rng_state(self.device_random_state, device)


class OomLadder:
    """Guards the first optimizer steps of a fit.

    Args:
        trainer: of the fit; its automatic optimization is guarded.
        next_plan: lays the module out by the next leaner plan and says which; None when there is none. A collective.
        explain: the text of the error when the ladder ends.
        num_steps: optimizer steps to guard.
        host_free_bytes: what each process may take of host memory for a copy of what the first update changes.
    """

    def __init__(
        self,
        trainer: Trainer,
        next_plan: Callable[[], str | None],
        explain: Callable[[], str],
        num_steps: int,
        host_free_bytes: Callable[[], int],
    ) -> None:
        global _fits
        _fits += 1
        self._trainer = trainer
        self._next_plan = next_plan
        self._explain = explain
        self._num_steps = num_steps
        self._first = trainer.global_step
        self._loop = trainer.fit_loop.epoch_loop.automatic_optimization
        self._run = self._loop.run
        self._flag = OomFlag(trainer.strategy, str(_fits)) if trainer.world_size > 1 else None
        self._window = Window()
        self._voted = False
        self._host_free_bytes = host_free_bytes
        self._before: BeforeUpdate | None = None
        self._not_kept = ""
        """Why there is no copy to put back."""
        self._loop.__dict__["run"] = self.run

    def close(self) -> None:
        """Guard no more."""
        self._loop.__dict__.pop("run", None)
        self._window, self._before = Window(), None

    @property
    def active(self) -> bool:
        """Whether steps are still guarded."""
        return "run" in self._loop.__dict__

    def run(self, optimizer: Any, batch_idx: int, kwargs: Any) -> Any:
        """One micro-batch, in place of Lightning's; again under a leaner plan until it goes through."""
        if self._trainer.global_step - self._first >= self._num_steps:
            self.close()
            return self._run(optimizer, batch_idx, kwargs)
        if batch_idx % self._trainer.accumulate_grad_batches == 0 or not self._window.batches:
            self._trainer.strategy._rest()  # type: ignore[attr-defined]  # ours: parameters are the shards
            self._window = Window.open(self._module, self._device)
        self._window.batches.append((batch_idx, kwargs))
        failed, result = self._attempt(optimizer, again=False)
        while failed is not None:
            self._climb(failed)
            failed, result = self._attempt(optimizer, again=True)
        return result

    def voting(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """The closure of an optimizer step, which returns only once all ranks came through theirs."""

        def run() -> Any:
            result = closure()
            self._vote()
            self._keep(optimizer)
            return result

        return run

    def updated(self) -> None:
        """Go on after an update only once all ranks came through theirs."""
        self._vote("updated")
        self._before = None

    def _keep(self, optimizer: Optimizer) -> None:
        """Copy what the first update of the fit will change."""
        self._before = None
        if self._trainer.global_step > self._first:
            self._not_kept = "only what the first update of a fit changes is kept to be put back"
            return
        needed, free = changed_bytes(optimizer), self._host_free_bytes()
        if needed > free:
            self._not_kept = f"the host has {format_bytes(free)} free for a copy of {format_bytes(needed)} per process"
            return
        self._before = BeforeUpdate(optimizer)

    def _step(self, optimizer: Any, *, again: bool) -> Any:
        """The micro-batch in hand; after a climb those before it first."""
        *before, (batch_idx, kwargs) = self._window.batches
        for index, earlier in before if again else ():
            run_micro_batch(self._trainer, optimizer, index, earlier)
        self._voted = False
        result = self._run(optimizer, batch_idx, kwargs)
        if not self._voted:  # no update followed: between micro-batches the loop talks to the other ranks as well
            self._vote()
        return result

    def _vote(self, what: str = "through") -> None:
        self._voted = True
        if self._flag is not None:
            self._flag.vote(f"{what}/{self._trainer.global_step}/{self._window.batches[-1][0]}")

    def _attempt(self, optimizer: Any, *, again: bool) -> tuple[str | None, Any]:
        """(None, result), or why it did not go through: empty where another rank is the reason."""
        if self._flag is not None:
            self._flag.watch()
        try:
            return None, self._step(optimizer, again=again)
        except torch.OutOfMemoryError as error:
            if self._flag is not None:
                self._flag.raise_flag()
            return str(error).splitlines()[0], None
        except Exception:
            if self._flag is None or not self._flag.is_up:
                raise
            return "", None
        finally:
            if self._flag is not None:
                self._flag.stop_watching()

    def _climb(self, failed: str) -> None:
        """Leave the step, meet again, and lay the module out by the next plan."""
        self._trainer.strategy.let_go()  # type: ignore[attr-defined]  # ours
        for parameter in self._module.parameters():
            parameter.grad = None
        if self._before is not None:
            self._before.restore()
            self._before = None
        mine = {
            "failed": failed,
            "step": self._trainer.global_step,
            "updated": self._why_lost() if self._window.updated(self._module) else "",
        }
        gc.collect()  # a process group of gloo ends when nothing holds it, and with it the waiting of the others
        everyone = [mine] if self._flag is None else self._flag.meet_again(mine)
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        where = ", ".join(str(rank) for rank, row in enumerate(everyone) if row["failed"])
        if any(row["updated"] or row["step"] != mine["step"] for row in everyone):
            why = next((f": {row['updated']}" for row in everyone if row["updated"]), "")
            raise torch.OutOfMemoryError(
                f"Out of memory on rank {where} while the optimizer updated weights, so the step cannot be done again{why}. "
                f"{self._explain()}"
            )
        self._window.restore_scaler()
        taken = self._next_plan()
        if taken is None:
            raise torch.OutOfMemoryError(f"Out of memory on rank {where}, and no plan needs less. {self._explain()}")
        rank_zero_info(f"Out of memory on rank {where}: all ranks do the step again under a leaner plan, {taken}.")
        self._window.restore(self._module, self._device)

    def _why_lost(self) -> str:
        return self._not_kept or "they were changed outside of an update"

    @property
    def _module(self) -> LightningModule:
        return self._trainer.lightning_module

    @property
    def _device(self) -> torch.device:
        return self._trainer.strategy.root_device


class OomFlag:
    """A flag that any rank can raise for all, and the votes, in the store where the ranks met."""

    def __init__(self, strategy: Any, run: str) -> None:
        self._strategy = strategy
        self._store = default_store(f"lightning_shard/oom/{run}")
        self._level = 0
        self._watcher: threading.Thread | None = None
        self._stop = threading.Event()

    @property
    def is_up(self) -> bool:
        """Whether a rank has run out of memory under the plan in force."""
        return bool(self._store.check([f"{self._level}/up"]))

    def raise_flag(self) -> None:
        """Tell all ranks to leave the step."""
        self._store.set(f"{self._level}/up", "")

    def watch(self) -> None:
        """Abort the process groups as soon as the flag is up."""
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._wait, args=(self._stop,), daemon=True)
        self._watcher.start()

    def stop_watching(self) -> None:
        """The step is over."""
        self._stop.set()
        if self._watcher is not None:
            self._watcher.join()

    def vote(self, micro_batch: str) -> None:
        """Wait until all ranks came through this part of a micro-batch.

        Raises:
            PeerOutOfMemory: when one did not.
        """
        key = f"{self._level}/{micro_batch}"
        self._store.add(key, 1)
        while self._store.add(key, 0) < self._strategy.world_size:
            if self.is_up:
                raise PeerOutOfMemory("another rank ran out of memory in this step")
            self._stop.wait(POLL_S)

    def meet_again(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """New process groups, once all ranks have left the old ones; what each has to say."""
        strategy, world = self._strategy, self._strategy.world_size
        if dist.is_initialized():
            abort_process_groups()
        strategy.forget_groups()
        self._level += 1
        left = f"{self._level}/left"
        self._store.add(left, 1)
        self._wait_for(left, world)
        store = PrefixStore(f"{self._level}/group", self._store)
        backend = strategy._get_process_group_backend()
        open_group(store, strategy.global_rank, world, backend, strategy.root_device, strategy._timeout)
        return gather(mine)

    def _wait_for(self, key: str, count: int) -> None:
        for _ in range(int(LEAVE_S / POLL_S)):
            if self._store.add(key, 0) >= count:
                return
            threading.Event().wait(POLL_S)
        raise RuntimeError(
            f"After running out of memory, {self._store.add(key, 0)} of {count} ranks left the step within {LEAVE_S:g} s. "
            "The others may hang in something that is no collective: look at their output."
        )

    def _wait(self, stop: threading.Event) -> None:
        while not stop.wait(POLL_S):
            if self.is_up:
                abort_process_groups()
                return
