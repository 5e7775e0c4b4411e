"""The Doctor callback: examines a run before it trains and after its first steps."""

import warnings
from collections.abc import Iterator
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard._compat import Callback, LightningModule, Trainer
from lightning_shard.doctor.finding import DoctorError, Finding, agree
from lightning_shard.doctor.first_steps import GradientWatch, OutputWatch, check_adapter_gradients, check_finite
from lightning_shard.doctor.replicas import check_replicas
from lightning_shard.doctor.run import check_callbacks, check_checkpoints, check_loaders, check_memory, check_module
from lightning_shard.parallelize.shard import reshard_all
from lightning_shard.parallelize.together import gather, rank_in

ADAPTER_STEPS = 3
"""Steps until every adapter must have had a gradient: A's waits for B, and B for a learning rate above 0."""


class Doctor(Callback):
    """Looks for what would waste the run; every rank comes to the same answer.

    Before training: each trainable parameter has exactly one gradient reduction and an optimizer, replicas are equal,
    fresh adapters start from zero, types fit together, nothing is left on the meta device, callbacks fit the layout,
    checkpoints fit on the disk, the plan's memory is free. After the first step: gradients are finite (else the module
    that made the first NaN is named) and replicas still equal; after the third: every adapter has had a gradient.

    Our strategies bring one along unless the Trainer has its own; ``Doctor(strict=False)`` warns where it would stop the
    run.

    Args:
        strict: raise :class:`DoctorError` on all ranks for a finding that would waste the run.
    """

    def __init__(self, *, strict: bool = True) -> None:
        self.strict = strict
        self.findings: list[Finding] = []
        """Everything found so far in this fit."""
        self._at_start: set[int] = set()
        self._outputs: OutputWatch | None = None
        self._gradients: GradientWatch | None = None
        self._first = 0
        self._looked = False

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.findings = []
        self._at_start = {id(p) for p in pl_module.parameters() if p.requires_grad}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _rest(trainer, pl_module)
        self._report(agree(list(self._before(trainer, pl_module))) + list(check_replicas(pl_module, "at the start")))
        self._first = trainer.global_step
        self._gradients, self._looked = GradientWatch(), False
        plan = getattr(trainer.strategy, "plan", None)
        # Hooks inside compiled blocks would be compiled with them.
        self._outputs = None if plan is not None and plan.compile else OutputWatch(pl_module)

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        if self._gradients is not None:
            self._gradients.look(pl_module, optimizer)
            if self._outputs is not None:
                self._outputs.close()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        steps = trainer.global_step - self._first
        if self._gradients is None or steps < 1:
            return
        if not self._looked:  # once: the micro-batches of the next step come at the same step count
            self._looked = True
            self._after_first(trainer, pl_module)
        if steps >= ADAPTER_STEPS:
            self._report(list(check_adapter_gradients(*_over_ranks(self._gradients))))
            self._gradients = None

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._leave()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._leave()

    def _before(self, trainer: Trainer, module: LightningModule) -> Iterator[Finding]:
        yield from check_module(trainer, module, self._at_start)
        yield from check_callbacks(trainer, sharded=bool(getattr(trainer.strategy, "sharded", False)))
        yield from check_checkpoints(trainer, module)
        yield from check_memory(trainer)
        yield from check_loaders(trainer)

    def _after_first(self, trainer: Trainer, module: LightningModule) -> None:
        assert self._gradients is not None
        scaled = trainer.precision == "16-mixed"  # its first steps overflow by design
        found = [] if scaled else list(check_finite(self._gradients, self._outputs))
        self._outputs = None
        _rest(trainer, module)
        self._report(agree(found) + list(check_replicas(module, "after the first step")))

    def _report(self, findings: list[Finding]) -> None:
        self.findings += findings
        errors = [finding for finding in findings if finding.level == "error"]
        if errors and self.strict:
            raise DoctorError(errors)
        if rank_in() == 0:
            for finding in findings:
                warnings.warn(str(finding), stacklevel=2)

    def _leave(self) -> None:
        if self._outputs is not None:
            self._outputs.close()
        self._outputs = self._gradients = None


def attach_doctor(trainer: Trainer) -> None:
    """Give the run a Doctor unless it has one."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set from another class
    if not any(isinstance(callback, Doctor) for callback in callbacks):
        callbacks.append(Doctor())


def _rest(trainer: Trainer, module: LightningModule) -> None:
    """Have parameters be the shards that are trained: a hook that computed with a layer leaves them gathered."""
    if getattr(trainer.strategy, "sharded", False):
        reshard_all(module)


def _over_ranks(watch: GradientWatch) -> tuple[set[str], set[str]]:
    """Parameters seen and those with a gradient, on any rank. A collective."""
    return watch.seen, watch.seen - set.intersection(*gather(watch.seen - watch.nonzero))
