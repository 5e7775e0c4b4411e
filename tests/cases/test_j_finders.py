"""Lightning's tuners on laid-out models (case J7)."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.regression import Regression, make_vectors
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from lightning_shard.testing import run_ranks
from lightning_shard.testing.parity import QUIET, trained_parameters

STRATEGIES = ["tuned-ddp", "fsdp2", "auto-shard"]


class WithFinders(Regression):
    """A module with the attributes that the finders set."""

    batch_size = 4

    def __init__(self) -> None:
        super().__init__(lr=0.05)

    def train_dataloader(self) -> Any:
        return make_vectors(dist.get_rank() if dist.is_initialized() else 0, dist.get_world_size())


class Remembers(Callback):
    """The weights when training starts, after any tuner."""

    before: dict[str, torch.Tensor]
    after: dict[str, torch.Tensor]

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self.before = trained_parameters(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.after = trained_parameters(pl_module)


def find_rate(strategy: str, folder: Path) -> dict[str, Any]:
    remembers = Remembers()
    finder = LearningRateFinder(num_training_steps=6)
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": True, "default_root_dir": folder}, strategy=strategy, devices=dist.get_world_size(),
        max_steps=2, callbacks=[finder, remembers],
    )  # fmt: skip
    module = WithFinders()
    trainer.fit(module)
    assert finder.optimal_lr is not None
    tried = len(finder.optimal_lr.results["lr"])
    return {
        "before": remembers.before,
        "after": remembers.after,
        "lr": module.lr,
        "steps": trainer.global_step,
        "tried": tried,
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_j7_the_learning_rate_finder_puts_weights_back_on_all_ranks(strategy: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, find_rate, strategy, tmp_path)
    assert first["tried"] >= 5
    assert first["lr"] == second["lr"]
    for seen in (first, second):
        assert seen["steps"] == 2
        torch.testing.assert_close(seen["after"], first["before"], rtol=0, atol=0)


def find_size(strategy: str) -> str:
    trainer = Trainer(
        **QUIET, strategy=strategy, devices=dist.get_world_size(), max_steps=2, callbacks=[BatchSizeFinder()]
    )  # type: ignore[arg-type]
    try:
        trainer.fit(WithFinders())
    except Exception as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_j7_the_batch_size_finder_is_refused_on_all_ranks_before_anything_runs(strategy: str) -> None:
    for said in run_ranks(2, find_size, strategy):
        assert "The Batch size finder is not supported with distributed strategies" in said
