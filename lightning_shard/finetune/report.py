"""What a fine-tuning run tells: its plan, its losses, sample answers and where the result lies."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from lightning_shard._compat.trainer import name_epochs_plainly
from lightning_shard.finetune.classify import Classifier
from lightning_shard.finetune.data import InstructionData
from lightning_shard.finetune.describe import data_facts
from lightning_shard.finetune.export import save
from lightning_shard.finetune.generate import answer
from lightning_shard.finetune.model import CausalLM
from lightning_shard.plans import Plan


@dataclass(frozen=True, slots=True)
class Sample:
    """A question of the validation set, its reference and the trained model's answer."""

    question: str
    reference: str
    answer: str


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What came of a run."""

    val_losses: list[float] = field(default_factory=list)
    """Of each validation outside of training: the first is before, the last after."""
    val_accuracies: list[float] = field(default_factory=list)
    """The same of the share of right answers; empty where there is no such thing."""
    samples: list[Sample] = field(default_factory=list)
    folder: Path | None = None
    """Where the result was written."""
    adapter: bool = False
    """Whether that is a PEFT adapter; a whole model otherwise."""
    merges: bool = False
    """Whether ``lightning-shard export`` merges it: a head that is new is in no base's files."""
    plan: dict[str, Any] = field(default_factory=dict)
    """The plan it ran under; empty for a strategy that has none."""
    steps: int = 0
    """Optimizer steps."""
    seconds: float = 0.0
    """Of the whole run, after start-up."""
    data: dict[str, Any] = field(default_factory=dict)
    """Counts of each split: rows, tokens, what was cut."""
    batch: dict[str, int] = field(default_factory=dict)
    """Rows per optimizer step and per micro-batch, and micro-batches per step."""

    @property
    def change(self) -> float:
        """Relative change of the validation loss, negative where it fell."""
        return self.val_losses[-1] / self.val_losses[0] - 1 if self.val_losses else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "val_loss_before": self.val_losses[0] if self.val_losses else None,
            "val_loss_after": self.val_losses[-1] if self.val_losses else None,
            "val_loss_change": self.change,
            "val_accuracy_before": self.val_accuracies[0] if self.val_accuracies else None,
            "val_accuracy_after": self.val_accuracies[-1] if self.val_accuracies else None,
            "samples": [asdict(sample) for sample in self.samples],
            "adapter" if self.adapter else "model": None if self.folder is None else str(self.folder.resolve()),
            "plan": self.plan,
            "data": self.data,
            "batch": self.batch,
            "steps": self.steps,
            "seconds": round(self.seconds, 1),
        }


class FinetuneReport(Callback):
    """Shows how a run starts, keeps the losses, and when training ends writes the result and asks for sample answers.

    Args:
        folder: the run's folder; the result is its ``adapter`` or ``model``.
        show_start: called on the first rank, once for each plan that comes into force.
        num_samples: how many questions of the validation set to ask.
    """

    def __init__(self, folder: Path, show_start: Callable[[Trainer], None], num_samples: int = 2) -> None:
        self.folder = folder
        self.show_start = show_start
        self.num_samples = num_samples
        self.outcome = Outcome()
        self._start = time.monotonic()
        self._shown: object = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == TrainerFn.FITTING:
            name_epochs_plainly(trainer)

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._plan(trainer)

    @override
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._plan(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.VALIDATING:
            self.outcome.val_losses.append(float(trainer.callback_metrics["val_loss"]))
            if "val_accuracy" in trainer.callback_metrics:
                self.outcome.val_accuracies.append(float(trainer.callback_metrics["val_accuracy"]))
            self.outcome.seconds = time.monotonic() - self._start

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """While the model is still on its devices, in its layout: every rank takes part."""
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(pl_module, (CausalLM, Classifier))
        outcome = self.outcome
        outcome.steps, outcome.adapter = trainer.global_step, pl_module.lora is not None
        deal = data.deal()
        outcome.data = data_facts(data) if isinstance(data, InstructionData) else {}
        outcome.batch = {
            "rows": deal.global_batch_size,
            "micro_batch_size": deal.micro_batch_size,
            "accumulate": deal.accumulate,
        }
        outcome.folder = self.folder / ("adapter" if outcome.adapter else "model")
        outcome.merges = outcome.adapter and isinstance(pl_module, CausalLM)
        labels = getattr(data, "label_names", ())
        save(pl_module.model, outcome.folder, data.processor, writes=trainer.is_global_zero, labels=labels)
        for messages in getattr(data, "sample_conversations", [])[: self.num_samples]:
            *asked, reference = messages
            reply = answer(pl_module.model, data.tokenizer, asked)
            outcome.samples.append(Sample(asked[-1]["content"], reference["content"], reply))

    def _plan(self, trainer: Trainer) -> None:
        plan = getattr(trainer.strategy, "plan", type(trainer.strategy).__name__)  # Lightning's own have none
        if trainer.is_global_zero and plan != self._shown:
            self._shown = plan
            self.show_start(trainer)
        self.outcome.plan = plan.to_dict() if isinstance(plan, Plan) else {}


def render(outcome: Outcome) -> Table:
    """The end of a run, to print."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    if outcome.val_losses:
        before, after = outcome.val_losses[0], outcome.val_losses[-1]
        table.add_row("Validation loss", f"{before:.4f} before, {after:.4f} after ({outcome.change:+.1%})")
    if outcome.val_accuracies:
        before, after = outcome.val_accuracies[0], outcome.val_accuracies[-1]
        table.add_row("Accuracy", f"{before:.1%} before, {after:.1%} after")
    for sample in outcome.samples:
        table.add_row("Question", Text(sample.question))
        table.add_row("  reference", Text(sample.reference))
        table.add_row("  answer", Text(sample.answer))
    table.add_row("Run", f"{outcome.steps} optimizer steps; {outcome.seconds:.0f} s with both validations")
    if outcome.folder is not None:
        where = outcome.folder.resolve()
        table.add_row("Adapter" if outcome.adapter else "Model", Text(str(where)))
        near = where.relative_to(Path.cwd()) if where.is_relative_to(Path.cwd()) else where
        if outcome.merges:
            table.add_row("  merge it", Text(f"lightning-shard export {near} --to merged"))
        table.add_row("Draw the run", Text(f"lightning-shard report {near.parent}"))
    return table
