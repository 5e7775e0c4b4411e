"""Lightning's own demonstration models go through every entry point, in every order, twice in a row."""

from itertools import permutations
from typing import Any

import pytest
import torch
from helpers.checkered import checkered
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, ManualOptimBoringModel
from torch import Tensor, nn

import lightning_shard  # noqa: F401 - registers the strategies
from lightning_shard.testing import run_ranks
from lightning_shard.testing.parity import QUIET, trained_parameters

ENTRY_POINTS = ("fit", "validate", "test", "predict")
ORDERS = list(permutations(ENTRY_POINTS))
STRATEGIES = ["tuned-ddp", "fsdp2", "auto-shard"]


class BuiltLate:
    """Moves the layers of a demonstration model to ``configure_model``."""

    layer: Any

    def __init__(self) -> None:
        super().__init__()
        self.layer = None

    def configure_model(self) -> None:
        if self.layer is None:
            torch.manual_seed(1)
            self.layer = nn.Linear(32, 2)


class LateBoringModel(BuiltLate, BoringModel):
    pass


class LateManualBoringModel(BuiltLate, ManualOptimBoringModel):
    pass


MODELS: dict[str, type[LightningModule]] = {
    "automatic": BoringModel,
    "manual": ManualOptimBoringModel,
    "automatic-late": LateBoringModel,
    "manual-late": LateManualBoringModel,
}


def go_through(strategy: str, model: str, orders: list[tuple[str, ...]]) -> list[dict[str, Tensor]]:
    """Weights after each order, every entry point of it called twice in a row."""
    return [go_through_one(strategy, model, order) for order in orders]


def go_through_one(strategy: str, model: str, order: tuple[str, ...]) -> dict[str, Tensor]:
    torch.manual_seed(1)
    module = MODELS[model]()
    data = BoringDataModule()
    trainer = Trainer(
        **{**QUIET, "use_distributed_sampler": True, "barebones": False},
        strategy=strategy,
        devices=2,
        max_epochs=1,
        limit_train_batches=3,
        limit_val_batches=2,
        limit_test_batches=2,
        limit_predict_batches=2,
    )
    for entry_point in order:
        for _ in range(2):
            trainer.fit_loop.max_epochs = trainer.current_epoch + 1
            result = getattr(trainer, entry_point)(module, datamodule=data)
            assert trainer.state.finished
            if entry_point == "predict":
                assert [tuple(batch.shape) for batch in result] == [(1, 2)] * 2
    assert trainer.global_step == 6
    return trained_parameters(module)


@pytest.fixture(scope="module")
def by_lightning() -> dict[str, list[dict[str, Tensor]]]:
    """What Lightning's own DDP arrives at."""
    return {model: run_ranks(2, go_through, "ddp", model, ORDERS[:1])[0] for model in MODELS}


@pytest.mark.parametrize(*checkered(one_in=3, strategy=STRATEGIES, model=MODELS))
def test_every_entry_point_in_every_order(
    strategy: str, model: str, by_lightning: dict[str, list[dict[str, Tensor]]]
) -> None:
    (expected,) = by_lightning[model]
    for results in run_ranks(2, go_through, strategy, model, ORDERS, timeout_s=300):
        assert len(results) == len(ORDERS)
        for weights in results:
            torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)
