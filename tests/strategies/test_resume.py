"""A run that stops and goes on, under the same or another layout, ends where it would have ended."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.checkered import checkered
from helpers.llama import TinyLlama, Training, make_tokens
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_shard import FSDP2Strategy, TunedDDPStrategy
from lightning_shard.testing import run_ranks
from lightning_shard.testing.parity import QUIET, trained_parameters

LAYOUTS: dict[str, tuple[int, Any]] = {
    "one": (1, "auto-shard"),
    "ddp-2": (2, "tuned-ddp"),
    "fsdp2-2": (2, "fsdp2"),
    "hsdp-2x2": (4, partial(FSDP2Strategy, dp_shard=2)),
}
FILES: dict[str, Any] = {
    "ddp-2": partial(TunedDDPStrategy, checkpoint_format="file"),
    "fsdp2-2": partial(FSDP2Strategy, checkpoint_format="file"),
}


def train(
    training: Training, strategy: Any, folder: Path, *, epochs: int, ckpt: Path | None = None
) -> dict[str, torch.Tensor]:
    """Weights after ``epochs`` epochs of two steps; a checkpoint is left after each."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = TinyLlama(training, tied=True)
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": True},
        strategy=strategy if isinstance(strategy, str) else strategy(),
        devices=world_size,
        max_epochs=epochs,
        limit_train_batches=2,
        callbacks=[ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1, every_n_epochs=1)],
    )
    trainer.fit(module, make_tokens(rank, world_size), ckpt_path=ckpt)
    assert trainer.global_step == 2 * epochs
    return trained_parameters(module)


@pytest.mark.parametrize(*checkered(after=["one", "ddp-2", "fsdp2-2"], training=["full", "lora"]))
@pytest.mark.parametrize(
    "before", [pytest.param(name, marks=pytest.mark.slow if "hsdp" in name else ()) for name in LAYOUTS]
)
def test_any_layout_goes_on_from_any_other(before: str, after: str, training: Training, tmp_path: Path) -> None:
    (expected,) = run_ranks(1, train, training, "auto", tmp_path / "whole", epochs=2)
    num_ranks, strategy = LAYOUTS[before]
    run_ranks(num_ranks, train, training, strategy, tmp_path, epochs=1)
    num_ranks, strategy = LAYOUTS[after]
    checkpoint = tmp_path / "epoch=0.ckpt"
    for weights in run_ranks(num_ranks, train, training, strategy, tmp_path / "on", epochs=2, ckpt=checkpoint):
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("layout", FILES)
def test_lightning_alone_can_read_a_checkpoint_that_is_a_file(layout: str, tmp_path: Path) -> None:
    weights, *_ = run_ranks(2, train, "full", FILES[layout], tmp_path, epochs=1)
    module = TinyLlama.load_from_checkpoint(tmp_path / "epoch=0.ckpt", tied=True, weights_only=True)
    for name, value in trained_parameters(module).items():
        assert torch.equal(value, weights[name]), name
