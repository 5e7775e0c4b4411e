"""``lightning-shard export``: what transformers and peft load without this package, and what they would have made of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.llama import VOCABULARY, llama_config, make_tokens
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from lightning_shard import TunedDDPStrategy, lora
from lightning_shard.cli import main
from lightning_shard.testing.parity import QUIET

IDS = torch.arange(VOCABULARY)[None, :12]
METHODS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": "all-linear"},
    "rslora": {"method": "rslora", "target_modules": ["q_proj", "down_proj"]},
    "dora": {"method": "dora", "target_modules": ["q_proj", "v_proj"]},
    "modules": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}


class Loaded(LightningModule):
    """A model from a folder, with an adapter or trained in full."""

    def __init__(self, folder: Path, adapter: dict[str, Any] | None, dtype: torch.dtype) -> None:
        super().__init__()
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        self.model = model if adapter is None else lora(model, r=4, seed=7, **adapter)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def base_folder(path: Path, dtype: torch.dtype = torch.float32, *, tied: bool = False) -> Path:
    torch.manual_seed(1)
    LlamaForCausalLM(llama_config(tied=tied)).to(dtype).save_pretrained(path, max_shard_size="20KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


def checkpoint(base: Path, path: Path, adapter: dict[str, Any] | None, dtype: torch.dtype = torch.float32) -> Loaded:
    module = Loaded(base, adapter, dtype)
    precision: Any = "bf16-true" if dtype is torch.bfloat16 else "32-true"
    trainer = Trainer(**QUIET, strategy=TunedDDPStrategy(), devices=1, max_steps=3, precision=precision)
    trainer.fit(module, make_tokens(0, 1))
    trainer.save_checkpoint(path)
    return module


@pytest.mark.parametrize(
    ("method", "dtype"),
    [
        ("lora", torch.bfloat16),
        ("dora", torch.float32),
        *(
            pytest.param(method, dtype, marks=pytest.mark.slow)
            for method, dtype in (
                ("lora", torch.float32),
                ("rslora", torch.float32),
                ("rslora", torch.bfloat16),
                ("dora", torch.bfloat16),
                ("modules", torch.float32),
                ("modules", torch.bfloat16),
            )
        ),
    ],
)
def test_merged_is_bit_equal_to_pefts_own(method: str, dtype: torch.dtype, tmp_path: Path) -> None:
    from peft import PeftModel

    base = base_folder(tmp_path / "base", dtype)
    checkpoint(base, tmp_path / "x.ckpt", METHODS[method], dtype)
    assert main(["export", str(tmp_path / "x.ckpt"), "--to", "merged", "--output", str(tmp_path / "merged")]) == 0
    folder = tmp_path / "x.ckpt" / "adapter"
    assert main(["export", str(folder), "--to", "merged", "--output", str(tmp_path / "again")]) == 0
    for file in (tmp_path / "merged").iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()
        assert file.stat().st_mode == (tmp_path / "merged" / "config.json").stat().st_mode  # others can read it
    config = json.loads((tmp_path / "x.ckpt" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)  # G7
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    expected = PeftModel.from_pretrained(plain, tmp_path / "x.ckpt" / "adapter").merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == dtype
    for name, value in merged.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.slow
def test_merged_in_another_type(tmp_path: Path) -> None:
    from peft import PeftModel

    base = base_folder(tmp_path / "base")
    checkpoint(base, tmp_path / "x.ckpt", METHODS["lora"])
    main(
        ["export", str(tmp_path / "x.ckpt"), "--to", "merged", "--dtype", "bfloat16", "--output", str(tmp_path / "out")]
    )
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    expected = PeftModel.from_pretrained(plain, tmp_path / "x.ckpt" / "adapter").merge_and_unload().state_dict()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    for name, value in merged.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["tied", "untied"])
def test_a_model_trained_in_full_is_a_hugging_face_folder(tied: bool, tmp_path: Path) -> None:
    module = checkpoint(base_folder(tmp_path / "base", tied=tied), tmp_path / "x.ckpt", None)
    command = ["export", str(tmp_path / "x.ckpt"), "--to", "full", "--output", str(tmp_path / "out")]
    assert main([*command, "--max-shard-size", "40KB"]) == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(loaded.eval()(IDS).logits, module.model.eval()(IDS).logits)


def test_the_adapter_in_another_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file

    checkpoint(base_folder(tmp_path / "base"), tmp_path / "x.ckpt", METHODS["lora"])
    capsys.readouterr()
    assert main(["export", str(tmp_path / "x.ckpt"), "--to", "adapter", "--dtype", "bfloat16", "--json"]) == 0
    assert {path.name for path in (tmp_path / "x.ckpt").iterdir() if path.is_dir()} == {"adapter", "model", "state"}
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"to": "adapter", "output": str(tmp_path / "x-adapter")}
    weights = load_file(tmp_path / "x-adapter" / "adapter_model.safetensors")
    trained = load_file(tmp_path / "x.ckpt" / "adapter" / "adapter_model.safetensors")
    assert {name: value.to(torch.bfloat16).tolist() for name, value in trained.items()} == {
        name: value.tolist() for name, value in weights.items()
    }


def test_what_cannot_be_exported_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = base_folder(tmp_path / "base")
    checkpoint(base, tmp_path / "adapted.ckpt", METHODS["lora"])
    checkpoint(base, tmp_path / "full.ckpt", None)
    other = base_folder(tmp_path / "other")
    from safetensors.torch import load_file, save_file

    file = sorted(other.glob("*.safetensors"))[0]
    changed = load_file(file)
    name = next(n for n in changed if n.endswith("weight"))
    changed[name].view(-1)[0] += 1
    save_file(changed, file, metadata={"format": "pt"})
    for arguments, reason in (
        ([str(tmp_path / "none.ckpt"), "--to", "full"], "no checkpoint at"),
        ([str(base), "--to", "full", "--output", str(tmp_path / "o")], "no checkpoint folder"),
        ([str(tmp_path / "adapted.ckpt"), "--to", "full"], "--to merged"),
        ([str(tmp_path / "full.ckpt"), "--to", "adapter"], "--to full"),
        ([str(tmp_path / "full.ckpt"), "--to", "merged"], "--to full"),
        (
            [str(tmp_path / "adapted.ckpt" / "adapter"), "--to", "adapter", "--output", str(tmp_path / "o")],
            "PEFT folder",
        ),
        ([str(tmp_path / "full.ckpt"), "--to", "full", "--max-shard-size", "many"], "no size"),
        ([str(tmp_path / "full.ckpt"), "--to", "full", "--output", str(base)], "exists already"),
        ([str(tmp_path / "adapted.ckpt"), "--to", "merged", "--base", str(other)], "differs from the base"),
    ):
        assert main(["export", *arguments]) == 2
        assert reason in capsys.readouterr().err
    assert not list(tmp_path.glob(".*.partial"))
