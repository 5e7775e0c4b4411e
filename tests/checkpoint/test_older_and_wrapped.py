"""Checkpoints of earlier versions, and of modules with other wrappers around their parts (G4, H6)."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.regression import Regression, block_net, make_vectors
from lightning.pytorch import Trainer
from torch import nn

from lightning_shard import TunedDDPStrategy
from lightning_shard.checkpoint.directory import open_directory
from lightning_shard.testing.parity import QUIET, trained_parameters

GOLDEN = Path(__file__).parent / "golden"
ADAM = partial(torch.optim.Adam, eps=1e-4)


def compiled_net() -> nn.Module:
    net = block_net(1)
    net[0] = torch.compile(net[0], backend="eager")
    return net


def fit(make_net: Any, epochs: int, *, ckpt: Path | None = None, form: Any = "directory") -> tuple[Trainer, Regression]:
    module = Regression(make_net, optimizer=ADAM, lr=0.01)
    trainer = Trainer(**QUIET, strategy=TunedDDPStrategy(checkpoint_format=form), devices=1, max_epochs=epochs)
    trainer.fit(module, make_vectors(0, 1), ckpt_path=ckpt)
    return trainer, module


def test_a_file_of_the_first_version_still_resumes(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "version-0.ckpt", tmp_path / "x.ckpt")
    _, whole = fit(partial(block_net, 1), 2)
    _, resumed = fit(partial(block_net, 1), 2, ckpt=tmp_path / "x.ckpt")
    for name, value in trained_parameters(whole).items():
        torch.testing.assert_close(trained_parameters(resumed)[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("form", ["directory", pytest.param("file", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("before", "after"), [(True, False), (False, True), pytest.param(True, True, marks=pytest.mark.slow)]
)
def test_compiled_or_not_before_and_after(before: bool, after: bool, form: Any, tmp_path: Path) -> None:
    """H6, G4: all four, in both forms, and plain names in each."""
    make = {True: compiled_net, False: partial(block_net, 1)}
    trainer, _ = fit(make[before], 1, form=form)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    if form == "directory":
        names = open_directory(tmp_path / "x.ckpt", weights_only=None).tensors.names
        assert {name for name in names if name.startswith("model/")} == {
            f"model/{name}" for name in Regression(partial(block_net, 1)).state_dict()
        }
    _, whole = fit(make[False], 2)
    _, resumed = fit(make[after], 2, ckpt=tmp_path / "x.ckpt", form=form)
    for name, value in trained_parameters(whole).items():
        torch.testing.assert_close(trained_parameters(resumed)[name], value, rtol=1e-5, atol=1e-6)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    data = bytearray((GOLDEN / "version-0.ckpt").read_bytes())
    for name, harmed in (("flipped", data[:2000] + bytes([data[2000] ^ 1]) + data[2001:]), ("short", data[:-100])):
        file = tmp_path / f"{name}.ckpt"
        file.write_bytes(harmed)
        with pytest.raises(RuntimeError, match=rf"{name}\.ckpt is (truncated or )?altered"):
            fit(partial(block_net, 1), 2, ckpt=file)
