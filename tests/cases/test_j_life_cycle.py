"""Lightning's life cycle on laid-out models (case J5; J1 is with the samplers in D)."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.regression import Regression, make_vectors
from lightning.pytorch import Trainer
from torch.distributed.fsdp import FSDPModule

from lightning_shard import FSDP2Strategy
from lightning_shard.checkpoint.directory import open_directory
from lightning_shard.testing import ranks, run_ranks
from lightning_shard.testing.parity import QUIET, trained_parameters

STRATEGIES = ["tuned-ddp", "fsdp2", "auto-shard"]


def live(strategy: Any, folder: Path) -> dict[str, Any]:
    """fit, validate, test, fit again and save, with one Trainer; what can be seen of it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module, data = Regression(), make_vectors(rank, world_size)
    trainer = Trainer(**QUIET, strategy=strategy, devices=world_size, max_epochs=1)
    trainer.fit(module, data, data)
    groups = [id(part) for part in module.modules() if isinstance(part, FSDPModule)]
    validated = trainer.validate(module, data, verbose=False)[0]["val_loss"]
    tested = trainer.test(module, data, verbose=False)[0]["test_loss"]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data, data)
    assert groups == [id(part) for part in module.modules() if isinstance(part, FSDPModule)]
    assert trainer.global_step == 8
    file = folder / f"{world_size}-{strategy}.ckpt"
    trainer.save_checkpoint(file)
    return {"val_loss": validated, "test_loss": tested, "weights": trained_parameters(module), "file": file}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_j5_one_trainer_fits_validates_tests_fits_and_saves(strategy: str, tmp_path: Path) -> None:
    (expected,) = run_ranks(1, live, "auto", tmp_path)
    for seen in run_ranks(2, live, strategy, tmp_path):
        assert seen["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-5)
        assert seen["test_loss"] == pytest.approx(expected["test_loss"], rel=1e-5)
        torch.testing.assert_close(seen["weights"], expected["weights"], rtol=1e-5, atol=1e-6)
        tensors = open_directory(seen["file"], weights_only=None).tensors
        saved = {name: tensors.read_whole(f"model/{name}") for name in expected["weights"]}
        torch.testing.assert_close(saved, expected["weights"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first", ["validate", "test", "predict"])
@pytest.mark.parametrize("reshard", [True, False])
@ranks(2)
def test_j5_training_after_inference_mode(first: str, reshard: bool) -> None:
    """NCCL runs evaluate under inference mode; with gloo Lightning does not, unless told that this is not gloo."""
    from lightning.pytorch.loops import utilities

    data = make_vectors(dist.get_rank(), 2)
    module = Predicts()
    trainer = Trainer(
        **QUIET, strategy=FSDP2Strategy(reshard_after_forward=reshard), devices=2, max_epochs=1, inference_mode=True
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utilities, "dist", SimpleNamespace(get_backend=lambda: "nccl"))
        getattr(trainer, first)(module, data)
        assert module.was_inference
        trainer.fit(module, data)
    assert trainer.global_step == 4


class Predicts(Regression):
    was_inference = False

    def forward(self, x: Any) -> Any:
        self.was_inference |= torch.is_inference_mode_enabled()
        return super().forward(x)

    def predict_step(self, batch: Any, _: int) -> Any:
        return self(batch[0])


def predictions(strategy: Any) -> list[Any]:
    data = make_vectors(dist.get_rank(), dist.get_world_size())
    trainer = Trainer(**QUIET, strategy=strategy, devices=dist.get_world_size())
    result: list[Any] = trainer.predict(Predicts(), data) or []
    return result


@pytest.mark.parametrize("strategy", [*STRATEGIES, partial(FSDP2Strategy, reshard_after_forward=False)])
def test_predictions_are_those_of_one_process(strategy: Any) -> None:
    (whole,) = run_ranks(1, predict_with, "auto")
    first, second = run_ranks(2, predict_with, strategy)
    for batch, *parts in zip(whole, first, second, strict=True):
        torch.testing.assert_close(torch.cat(parts), batch)


def predict_with(strategy: Any) -> list[Any]:
    return predictions(strategy if isinstance(strategy, str) else strategy())
