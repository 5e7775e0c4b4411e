"""The base of a fine-tuning run is read straight into shards: the same numbers, and no whole model on any rank."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from tiny import make_model_folder, write_pairs
from transformers import AutoModelForCausalLM

from lightning_shard.finetune import CausalLM, InstructionData
from lightning_shard.finetune.streamed import streamed_model
from lightning_shard.specs import AdapterSpec
from lightning_shard.testing import run_ranks
from lightning_shard.testing.parity import QUIET, trained_parameters

ADAPTERS = {
    "lora": AdapterSpec(r=4, alpha=8),
    "dora": AdapterSpec(r=4, alpha=8, method="dora"),
    "head-saved": AdapterSpec(r=4, alpha=8, modules_to_save=("lm_head",)),
    "full": None,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model_folder(tmp_path / "model", tied=False)
    write_pairs(tmp_path / "rows.jsonl", 16)
    return tmp_path


class Watched(CausalLM):
    """Notes how many numbers of the base were in memory when the module was configured."""

    def configure_model(self) -> None:
        super().configure_model()
        assert self.model is not None
        parameters = dict(self.model.named_parameters())
        self.real = sum(p.numel() for p in parameters.values() if not p.is_meta)


def fit(folder: Path, lora: AdapterSpec | None, strategy: Any, precision: Any = "32-true") -> dict[str, Any]:
    seed_everything(7, verbose=False)
    module = Watched(str(folder / "model"), lora, learning_rate=1e-2)
    data = InstructionData(
        str(folder / "model"), str(folder / "rows.jsonl"), max_seq_len=64, global_batch_size=4, micro_batch_size=1
    )
    trainer = Trainer(**{**QUIET, "max_steps": 4}, devices=2, strategy=strategy, precision=precision)
    trainer.fit(module, datamodule=data)
    return {"real": module.real, "parameters": trained_parameters(module)}


def fit_loaded(folder: Path, lora: AdapterSpec | None, strategy: Any, precision: Any = "32-true") -> dict[str, Any]:
    """As :func:`fit`, with transformers loading the model whole."""
    from lightning_shard.finetune import model

    model.reads_streams = lambda strategy: False
    return fit(folder, lora, strategy, precision)


SLOW = pytest.mark.slow
CASES = [
    ("lora", "32-true", "fsdp2"),
    pytest.param("dora", "32-true", "fsdp2", marks=SLOW),
    pytest.param("head-saved", "32-true", "fsdp2", marks=SLOW),
    pytest.param("full", "32-true", "auto-shard", marks=SLOW),
    pytest.param(
        "dora", "bf16-true", "auto-shard", marks=SLOW
    ),  # what trains of a base keeps more than bf16 when streamed
]


@pytest.mark.parametrize(("kind", "precision", "strategy"), CASES)
def test_streamed_and_loaded_train_alike(folder: Path, kind: str, precision: str, strategy: str) -> None:
    streamed = run_ranks(2, fit, folder, ADAPTERS[kind], strategy, precision)[0]
    loaded = run_ranks(2, fit_loaded, folder, ADAPTERS[kind], strategy, precision)[0]
    assert streamed["real"] == 0 < loaded["real"]
    for name, value in loaded["parameters"].items():
        torch.testing.assert_close(streamed["parameters"][name], value, rtol=0, atol=0, msg=name)


def test_what_cannot_be_streamed_is_loaded_whole_and_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = folder / "model" / "config.json"
    plain = config.read_text()
    config.write_text(json.dumps({**json.loads(plain), "quantization_config": {"quant_method": "bitsandbytes"}}))
    assert streamed_model(str(folder / "model"), torch.float32) is None
    assert "loaded whole on every rank" in caplog.text
    assert "it is quantised" in caplog.text
    config.write_text(plain)
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    torch.save(model.state_dict(), folder / "model" / "pytorch_model.bin")
    (folder / "model" / "model.safetensors").unlink()
    assert streamed_model(str(folder / "model"), torch.float32) is None
    assert "holds no safetensors file" in caplog.text


def test_tensors_of_other_names_are_left_to_transformers(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    from safetensors.torch import load_file, save_file

    caplog.set_level(logging.INFO)
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.scale"] = tensors.pop("model.norm.weight")
    save_file(tensors, file, {"format": "pt"})
    assert streamed_model(str(folder / "model"), torch.float32) is None
    assert "no file holds 'model.norm.weight'" in caplog.text
