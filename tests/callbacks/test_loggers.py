"""The monitor logs through whatever logger a run has: the plain interface, and each of the common ones where installed."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from helpers.llama import TinyLlama, make_tokens
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger

from lightning_shard.callbacks import ShardMonitor
from lightning_shard.testing import run_ranks
from lightning_shard.testing.parity import QUIET

FIGURES = {"monitor/loss", "monitor/step_s", "monitor/tokens_per_s", "monitor/grad_norm"}


class Noting(Logger):
    """The least that a logger is."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    @property
    def name(self) -> str:
        return "noting"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, metrics))


def fit(*loggers: Logger) -> None:
    options: Any = {**QUIET, "logger": list(loggers)}
    world = dist.get_world_size()
    monitor = ShardMonitor(warm_up=1, report_after=4)
    trainer = Trainer(
        **options, strategy="auto-shard", devices=world, max_steps=8, callbacks=[monitor], log_every_n_steps=4,
        default_root_dir=str(loggers[0].save_dir or "."),
    )  # fmt: skip
    trainer.fit(TinyLlama("lora"), make_tokens(trainer.global_rank, world))


def fit_noting(folder: str) -> list[tuple[int | None, dict[str, float]]]:
    first, second = Noting(), Noting()
    first.__class__ = type("Placed", (Noting,), {"save_dir": folder})
    fit(first, second)
    own = [(step, row) for step, row in second.rows if "monitor/loss" in row]
    assert [row for row in first.rows if "monitor/loss" in row[1]] == own
    return own


def test_every_logger_of_a_run_gets_plain_numbers_by_step(tmp_path: Path) -> None:
    rows = run_ranks(2, fit_noting, str(tmp_path))[0]
    assert [step for step, _ in rows] == sorted({step for step, _ in rows})
    assert rows[-1][0] == 8
    assert set().union(*(row for _, row in rows)) >= FIGURES
    assert all(type(value) is float for _, row in rows for value in row.values())


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


def fit_tensorboard(folder: str) -> None:
    from lightning.pytorch.loggers import TensorBoardLogger

    fit(TensorBoardLogger(folder))


@pytest.mark.slow
@needs("tensorboard")
def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_ranks(2, fit_tensorboard, str(tmp_path))
    (file,) = tmp_path.rglob("events.*")
    events = EventAccumulator(str(file))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= FIGURES
    assert events.Scalars("monitor/step_s")[-1].step == 8


def fit_wandb(folder: str) -> None:
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    fit(WandbLogger(save_dir=folder, offline=True, project="tried"))
    wandb.finish()  # ranks of a test leave without what Python does at its end


@pytest.mark.slow
@needs("wandb")
def test_wandb_offline(tmp_path: Path) -> None:
    run_ranks(2, fit_wandb, str(tmp_path))
    (file,) = tmp_path.rglob("run-*.wandb")  # rank 0's alone
    assert all(name.encode() in file.read_bytes() for name in FIGURES)


def fit_mlflow(folder: str) -> None:
    from lightning.pytorch.loggers import MLFlowLogger

    fit(MLFlowLogger(save_dir=folder))


@pytest.mark.slow
@needs("mlflow")
def test_mlflow_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # newer releases ask whether files are meant
    run_ranks(2, fit_mlflow, str(tmp_path))
    found = {file.relative_to(file.parents[1]).as_posix() for file in tmp_path.rglob("metrics/monitor/*")}
    assert {name.split("/")[1] for name in FIGURES} <= {name.rsplit("/", 1)[-1] for name in found}
