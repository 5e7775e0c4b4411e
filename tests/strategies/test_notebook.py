"""In a notebook one device works, and several are told how to launch."""

import subprocess
import sys

import pytest

RUN = """
import sys
sys.ps1 = ">>> "  # what makes a Python interactive
import warnings; warnings.filterwarnings("ignore")
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_shard

def trainer(devices):
    return Trainer(strategy={strategy!r}, accelerator="cpu", devices=devices, max_steps=2, logger=False,
                   enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)

one = trainer(1)
one.fit(BoringModel())
one.fit_loop.epoch_loop.max_steps = 4
one.fit(BoringModel())  # a cell that is run again
print("ran", one.global_step)
try:
    trainer(2)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto-shard", "fsdp2"])
def test_one_device_works_and_several_are_told_how(strategy: str) -> None:
    code = RUN.format(strategy=strategy)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert "ran " in result.stdout
    assert "2 devices need 2 processes, and a notebook (or an interactive Python) is one" in result.stdout
    assert "!torchrun --nproc-per-node 2 train.py" in result.stdout
