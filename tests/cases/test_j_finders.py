"""Lightning's tuners on laid-out models (case J7)."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.regression import Regression, make_vectors
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

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


class RunsOut(WithFinders):
    """Above some size memory is out, on one rank, in forward or in the middle of backward."""

    def __init__(self, where: str, most: int, rank: int) -> None:
        super().__init__()
        self.batch_size = 4
        self.where, self.most, self.rank = where, most, rank
        self.tried: list[int] = []

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        data = TensorDataset(torch.randn(64, 8, generator=generator), torch.randn(64, 1, generator=generator))
        return DataLoader(data, batch_size=self.batch_size)

    val_dataloader = train_dataloader

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.tried.append(len(batch[0]))
        loss = super().training_step(batch, index)
        if len(batch[0]) > self.most and dist.get_rank() == self.rank:
            if self.where == "forward":
                run_out()
            loss.register_hook(run_out)
        return loss


def run_out(_: Any = None) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def find_size(strategy: str, folder: Path, where: str, mode: str) -> dict[str, Any]:
    remembers = Remembers()
    finder = BatchSizeFinder(mode=mode, margin=0.0)
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": True, "default_root_dir": folder}, strategy=strategy, devices=dist.get_world_size(),
        max_steps=2, callbacks=[finder, remembers],
    )  # fmt: skip
    module = RunsOut(where, most=10, rank=dist.get_world_size() - 1)
    trainer.fit(module)
    return {
        "size": (module.batch_size, finder.optimal_batch_size),
        "tried": sorted(set(module.tried)),
        "before": remembers.before,
        "after": remembers.after,
        "steps": (trainer.global_step, trainer.current_epoch, trainer.max_steps),
        "left": [path.name for path in folder.iterdir() if "scale_batch" in path.name],
        "weights": trained_parameters(module),
    }


@pytest.mark.parametrize(
    ("strategy", "ranks", "where", "mode", "size"),
    [
        pytest.param("tuned-ddp", 2, "forward", "power", 8, marks=pytest.mark.slow),
        ("tuned-ddp", 2, "backward", "binsearch", 10),
        ("auto-shard", 2, "backward", "power", 8),
        pytest.param("tuned-ddp", 1, "forward", "binsearch", 10, marks=pytest.mark.slow),
    ],
)
def test_j7_all_ranks_find_the_size_that_fits_on_each(
    strategy: str, ranks: int, where: str, mode: str, size: int, tmp_path: Path
) -> None:
    found = run_ranks(ranks, find_size, strategy, tmp_path, where, mode)
    for seen in found:
        assert seen["size"] == (size, size)
        assert seen["tried"] == found[0]["tried"]
        assert max(seen["tried"]) == 16
        assert seen["steps"] == (2, 1, 2)
        assert seen["left"] == []
        torch.testing.assert_close(seen["after"], seen["before"], rtol=0, atol=0)
        torch.testing.assert_close(seen["weights"], found[0]["weights"], rtol=0, atol=0)


def refused_size(strategy: str, folder: Path) -> str:
    try:
        find_size(strategy, folder, "forward", "power")
    except Exception as error:
        return str(error)
    return ""


def test_j7_a_search_over_shards_is_refused_on_all_ranks_before_anything_runs(tmp_path: Path) -> None:
    for said in run_ranks(2, refused_size, "fsdp2", tmp_path):
        assert "BatchSizeFinder runs until memory is out" in said
