"""ModelCheckpoint, ``ckpt_path``, ``load_from_checkpoint`` and hooks do what they do with Lightning's own strategies."""

import os
import shutil
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.regression import Regression, make_vectors
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_shard import FSDP2Strategy, TunedDDPStrategy
from lightning_shard.checkpoint.export import export_full
from lightning_shard.checkpoint.manifest import is_checkpoint
from lightning_shard.testing import run_ranks
from lightning_shard.testing.parity import QUIET, trained_parameters


def fit(module: Regression, *callbacks: Any, strategy: Any = None, ckpt: Any = None, **options: Any) -> Trainer:
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": bool(callbacks), "max_epochs": 3, **options},
        strategy=strategy or TunedDDPStrategy(),
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        callbacks=list(callbacks),
    )
    ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    trainer.fit(module, make_vectors(*ranks), make_vectors(*ranks), ckpt_path=ckpt)
    return trainer


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("async_save", [False, True], ids=["sync", "async"])
def test_top_k_by_a_metric_with_a_link_to_the_last(async_save: bool, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{epoch}", monitor="val_loss", save_top_k=2, save_last="link")
    fit(Regression(lr=0.01), saver, strategy=TunedDDPStrategy(async_save=async_save), max_epochs=4)
    assert names(tmp_path) == {"epoch=2.ckpt", "epoch=3.ckpt", "last.ckpt"}  # the loss falls: older ones are removed
    assert os.readlink(tmp_path / "last.ckpt") == "epoch=3.ckpt"
    assert all(is_checkpoint(path) for path in tmp_path.iterdir())
    trainer = fit(Regression(lr=0.01), ModelCheckpoint(tmp_path), ckpt="last", max_epochs=5)
    assert trainer.global_step == 5 * 4


@pytest.mark.parametrize("form", ["directory", "file"])
def test_every_n_steps_with_a_copy_for_the_last(form: Any, tmp_path: Path) -> None:
    saver = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=1, save_last=True)
    fit(Regression(), saver, strategy=TunedDDPStrategy(checkpoint_format=form))
    assert names(tmp_path) == {"step=12.ckpt", "last.ckpt"}
    assert (tmp_path / "last.ckpt").is_file() == (form == "file")
    trainer = fit(Regression(), ModelCheckpoint(tmp_path), ckpt="last", max_epochs=4)
    assert trainer.global_step == 16


def test_load_from_checkpoint_through_the_full_export(tmp_path: Path) -> None:
    module = Regression()
    fit(module, ModelCheckpoint(tmp_path, "x"))
    export_full(tmp_path / "x.ckpt", tmp_path / "whole.ckpt")
    loaded = Regression.load_from_checkpoint(tmp_path / "whole.ckpt", weights_only=True)
    for name, value in trained_parameters(module).items():
        assert torch.equal(loaded.state_dict()[name], value)


def test_weights_alone_can_be_saved_and_validated(tmp_path: Path) -> None:
    module = Regression()
    trainer = fit(module, ModelCheckpoint(tmp_path, "x", save_weights_only=True))
    expected = trainer.callback_metrics["val_loss"]
    again = Trainer(**QUIET, strategy=TunedDDPStrategy(), devices=1)
    (metrics,) = again.validate(Regression(), make_vectors(0, 1), ckpt_path=tmp_path / "x.ckpt", verbose=False)
    assert metrics["val_loss"] == float(expected)


class WithPath(Regression):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["where"] = Path("somewhere")


@pytest.mark.parametrize("form", ["directory", "file"])
def test_what_needs_more_than_plain_values_is_refused_with_the_remedy(form: Any, tmp_path: Path) -> None:
    """H9: a pathlib object needs the one-line remedy."""
    fit(WithPath(), ModelCheckpoint(tmp_path, "x"), strategy=TunedDDPStrategy(checkpoint_format=form), max_epochs=1)
    with pytest.raises(UnpicklingError, match=r"TunedDDPStrategy\(weights_only=False\)"):
        fit(WithPath(), ckpt=tmp_path / "x.ckpt")
    trainer = fit(WithPath(), strategy=TunedDDPStrategy(weights_only=False), ckpt=tmp_path / "x.ckpt", max_epochs=2)
    assert trainer.global_step == 8


class Renaming(Regression):
    """Reads a checkpoint of a module whose net had another name."""

    def __init__(self) -> None:
        super().__init__()
        self.renamed = self.net
        del self.net

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.renamed(x)
        return result

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        for name in list(state):
            state[name.replace("net.", "renamed.")] = state.pop(name)


def test_a_hook_sees_and_changes_what_is_loaded(tmp_path: Path) -> None:
    module = Regression()
    fit(module, ModelCheckpoint(tmp_path, "x"))
    renamed = Renaming()
    again = Trainer(**QUIET, strategy=TunedDDPStrategy(), devices=1)
    again.validate(renamed, make_vectors(0, 1), ckpt_path=tmp_path / "x.ckpt", verbose=False)
    for name, value in trained_parameters(module).items():
        assert torch.equal(renamed.state_dict()[name.replace("net.", "renamed.")], value)


def test_missing_and_unexpected_names_are_told_and_may_be_allowed(tmp_path: Path) -> None:
    fit(Regression(), ModelCheckpoint(tmp_path, "x"))
    other = Regression(lambda: nn.Sequential(nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 1)))
    with pytest.raises(RuntimeError, match=r"Missing from the checkpoint: 'net\.0\.0\.weight'.*Unexpected"):
        fit(other, ckpt=tmp_path / "x.ckpt", max_epochs=4)


def test_newly_frozen_and_unfrozen_parameters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    adam = partial(torch.optim.Adam, eps=1e-4)
    first = Regression(optimizer=adam, lr=0.01)
    first.net[1].bias.requires_grad_(False)
    fit(first, ModelCheckpoint(tmp_path, "x"), max_epochs=1)
    second = Regression(optimizer=adam, lr=0.01)
    second.net[1].weight.requires_grad_(False)
    trainer = fit(second, ckpt=tmp_path / "x.ckpt", max_epochs=2)
    assert "1 parameters did not train when the checkpoint was saved" in caplog.text
    steps = {
        name: int(trainer.optimizers[0].state[p]["step"]) for name, p in second.named_parameters() if p.requires_grad
    }
    assert steps.pop("net.1.bias") == 4
    assert set(steps.values()) == {8}


def test_a_failed_save_may_be_survived_and_older_checkpoints_stay(tmp_path: Path, caplog: Any) -> None:
    class Vanishing(ModelCheckpoint):
        def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
            if trainer.global_step == 8:  # something stands in the way of the folder
                shutil.rmtree(tmp_path / "blocked", ignore_errors=True)
                (tmp_path / "blocked").write_text("")
                filepath = str(tmp_path / "blocked" / "x.ckpt")
            super()._save_checkpoint(trainer, filepath)

    saver = Vanishing(tmp_path, "{epoch}", save_top_k=1)
    fit(Regression(), saver, strategy=TunedDDPStrategy(on_save_error="warn"), max_epochs=2)
    assert "was not written" in caplog.text
    assert is_checkpoint(tmp_path / "epoch=0.ckpt")


def disagree(folder: Path) -> list[str]:
    """Ranks see different values of the monitored metric (J4)."""

    class Disagreeing(Regression):
        def validation_step(self, batch: Any, _: int) -> None:
            sign = 1.0 if self.global_rank else -1.0
            self.log("val_loss", torch.tensor(sign * self.current_epoch), sync_dist=False)

    saver = ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=1, save_last="link")
    fit(Disagreeing(), saver, strategy=FSDP2Strategy(), max_epochs=3)
    dist.barrier()
    return sorted(path.name for path in folder.iterdir())


def test_ranks_that_disagree_about_the_best_do_not_hang(tmp_path: Path) -> None:
    first, second = run_ranks(2, disagree, tmp_path)
    assert first == second
    assert "last.ckpt" in first
    assert is_checkpoint(tmp_path / "last.ckpt")
