"""Weight averages through validation, a checkpoint and a resumed run (case J6)."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.llama import TinyLlama, make_tokens
from helpers.regression import Regression, make_vectors
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging

from lightning_shard import FSDP2Strategy, TunedDDPStrategy
from lightning_shard.checkpoint.storage import StoredTensors
from lightning_shard.testing import run_ranks
from lightning_shard.testing.parity import QUIET, trained_parameters

LAYOUTS: dict[str, Any] = {
    "ddp": partial(TunedDDPStrategy, checkpoint_format="file"),
    "ddp-folder": TunedDDPStrategy,
    "fsdp2": FSDP2Strategy,
    "fsdp2-file": partial(FSDP2Strategy, checkpoint_format="file"),
    "kept": partial(FSDP2Strategy, reshard_after_forward=False, checkpoint_format="file"),
    "replicated": partial(FSDP2Strategy, adapters="replicated", checkpoint_format="file"),
}


def averaged(strategy: Any, folder: Path) -> dict[str, Any]:
    """Two epochs with validation on the average, then two more from the checkpoint; what was seen of it."""
    world_size = dist.get_world_size()
    data = make_vectors(dist.get_rank(), world_size)
    seen: dict[str, Any] = {"val": []}
    file = folder / "two-epochs.ckpt"
    for epochs, resume in ((2, None), (4, file)):
        trainer = Trainer(
            **QUIET,
            strategy=strategy if isinstance(strategy, str) else strategy(),
            devices=world_size,
            max_epochs=epochs,
            callbacks=[Saves(file) if resume is None else EMAWeightAveraging(decay=0.5)],
        )
        module = Regression(lr=0.01)
        trainer.fit(module, data, data, ckpt_path=resume)
        seen["val"].append(float(trainer.callback_metrics["val_loss"]))
        seen[f"after {epochs}"] = trained_parameters(module)
    if dist.get_rank() == 0:
        seen["saved"] = saved_average(file)
    return seen


def saved_average(path: Path) -> dict[str, torch.Tensor]:
    if path.is_file():
        return torch.load(path, weights_only=True)["state_dict"]
    tensors = StoredTensors(path / "state")
    return {name: tensors.read_whole(f"model/{name}") for name in Regression().state_dict()}


class Saves(EMAWeightAveraging):
    """Saves while the run goes on: afterwards only the average is left."""

    def __init__(self, file: Path) -> None:
        super().__init__(decay=0.5)
        self.file = file

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        super().on_train_epoch_end(trainer, module)
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.file)


@pytest.mark.parametrize(
    "layout", ["fsdp2", *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name != "fsdp2")]
)
def test_j6_the_average_is_validated_saved_and_resumed_as_on_one_process(layout: str, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (expected,) = run_ranks(1, averaged, "auto", tmp_path / "one")
    results = run_ranks(2, averaged, LAYOUTS[layout], tmp_path)
    for seen in results:
        assert seen["val"] == pytest.approx(expected["val"], rel=1e-5)
        for moment in ("after 2", "after 4"):
            torch.testing.assert_close(seen[moment], expected[moment], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[0]["saved"], expected["saved"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["directory", "file"])
def test_adapters_with_an_average_resume(form: Any, tmp_path: Path) -> None:
    """Lightning's callback loads what trains strictly, the frozen base included: the checkpoint has it then."""
    for steps, ckpt in ((2, None), (4, tmp_path / "x.ckpt")):
        trainer = Trainer(
            **QUIET,
            strategy=TunedDDPStrategy(checkpoint_format=form),
            devices=1,
            max_steps=steps,
            callbacks=[EMAWeightAveraging(decay=0.5), SavesAtEnd(tmp_path / "x.ckpt")],
        )
        trainer.fit(TinyLlama("lora"), make_tokens(0, 1), ckpt_path=ckpt)
        assert trainer.global_step == steps


class SavesAtEnd(Callback):
    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.file)
