"""The base of a fine-tuning run is read straight into shards: the same numbers, and no whole model on any rank."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer, seed_everything
from safetensors.torch import load_file, save_file
from tiny import make_encoder, make_model_folder, put_into_cache, write_pairs, write_rows
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    ViTConfig,
    ViTModel,
)

from lightning_shard.finetune import CausalLM, InstructionData, LabelledText, TextClassifier
from lightning_shard.finetune.classify import HEADS
from lightning_shard.finetune.hub import pretrained_model
from lightning_shard.finetune.model import add_adapters
from lightning_shard.finetune.streamed import reads_streams, streamed_model
from lightning_shard.parallelize import parallelize
from lightning_shard.plans import Plan
from lightning_shard.pretrained import model_folder
from lightning_shard.specs import AdapterSpec, find_precision
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


class WatchedText(TextClassifier):
    def configure_model(self) -> None:
        super().configure_model()
        self.real = sum(p.numel() for p in self.model.parameters() if not p.is_meta)


def classify(folder: Path, lora: AdapterSpec | None, *, whole: bool) -> dict[str, Any]:
    from lightning_shard.finetune import classify as ours

    ours.reads_streams = (lambda strategy: False) if whole else reads_streams
    seed_everything(7 + dist.get_rank(), verbose=False)  # ranks may be seeded unlike
    module = WatchedText(str(folder / "model"), lora, learning_rate=1e-2)
    data = LabelledText(str(folder / "model"), str(folder / "rows.jsonl"), global_batch_size=4, micro_batch_size=2)
    trainer = Trainer(**{**QUIET, "max_steps": 2}, devices=2, strategy="fsdp2")
    trainer.fit(module, data)
    return {"real": module.real, "parameters": trained_parameters(module)}


@pytest.mark.parametrize(
    ("kind", "num_labels"),
    [
        pytest.param("lora", 0, marks=SLOW),
        pytest.param("full", 0, marks=SLOW),
        pytest.param("full", 2, marks=SLOW),
        ("lora", 5),
    ],
    ids=["new-head", "new-head-full", "other-labels-full", "other-labels"],
)
def test_classifiers_are_streamed_too_and_their_new_head_starts_by_its_name(
    tmp_path: Path, kind: str, num_labels: int
) -> None:
    make_encoder(tmp_path / "model", num_labels)
    write_rows(tmp_path / "rows.jsonl")
    streamed = run_ranks(2, classify, tmp_path, ADAPTERS[kind], whole=False)
    loaded = run_ranks(2, classify, tmp_path, ADAPTERS[kind], whole=True)
    assert streamed[0]["real"] == 0 < loaded[0]["real"]
    heads = [value for name, value in streamed[0]["parameters"].items() if "classifier" in name and value.dim() == 2]
    assert [tuple(value.shape) for value in heads] == [(3, 32)]
    for name, value in loaded[0]["parameters"].items():
        torch.testing.assert_close(streamed[0]["parameters"][name], value, rtol=0, atol=0, msg=name)
        torch.testing.assert_close(streamed[1]["parameters"][name], value, rtol=0, atol=0, msg=name)


def make_vit(folder: Path) -> None:
    """A ViT, which transformers writes under the names its older checkpoints have."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ViTModel(ViTConfig(**sizes, image_size=16, patch_size=8)).save_pretrained(folder)


def make_old_bert(folder: Path) -> None:
    """A Bert as the first ones were written."""
    make_encoder(folder)
    file = folder / "model.safetensors"
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in load_file(file).items()
    }
    assert any("gamma" in name for name in old)
    save_file(old, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("make", "auto_class"),
    [(make_vit, AutoModelForImageClassification), (make_old_bert, AutoModelForSequenceClassification)],
    ids=["vit", "bert"],
)
def test_older_checkpoints_are_streamed_by_the_names_transformers_gives_them(
    make: Any, auto_class: Any, tmp_path: Path
) -> None:
    make(tmp_path)
    options = {"id2label": {0: "a", 1: "b", 2: "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}
    torch.manual_seed(3)
    new = (*HEADS, "pooler")
    streamed = streamed_model(str(tmp_path), torch.float32, auto_class=auto_class, new=new, **options)
    cpu, precision = torch.device("cpu"), find_precision("32-true")
    parallelize(nn.Sequential(streamed), Plan(), precision=precision, device=cpu)
    wanted = pretrained_model(auto_class, str(tmp_path), new=new, ignore_mismatched_sizes=True, **options).state_dict()
    assert streamed.state_dict().keys() == wanted.keys()
    for name, value in streamed.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=0, msg=name)


def test_a_hub_id_is_its_snapshot_in_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_into_cache(folder / "model", folder / "cache", "acme/tiny")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model = streamed_model("acme/tiny", torch.float32)
    assert all(p.is_meta for p in model.parameters())
    assert model_folder("acme/tiny") == folder / "cache" / "models--acme--tiny" / "snapshots" / ("0" * 40)
    adapted = add_adapters(model, AdapterSpec(r=4))
    assert adapted.peft_config["default"].base_model_name_or_path == "acme/tiny"  # not where this machine's cache is


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
    caplog.set_level(logging.INFO)
    file = folder / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.scale"] = tensors.pop("model.norm.weight")
    save_file(tensors, file, {"format": "pt"})
    assert streamed_model(str(folder / "model"), torch.float32) is None
    assert "no file holds 'model.norm.weight'" in caplog.text
