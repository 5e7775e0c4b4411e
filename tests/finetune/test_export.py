"""What is written loads with plain peft and transformers, with the trained model's logits."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from tiny import make_model_folder, make_tokenizer

from lightning_shard.checkpoint.atomic import whole_folder
from lightning_shard.finetune.export import save
from lightning_shard.finetune.model import CausalLM, add_adapters, load
from lightning_shard.specs import AdapterSpec
from lightning_shard.testing import run_ranks

IDS = torch.arange(3, 30)[None]
LOAD_PLAINLY = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapter, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
if adapter:
    model = PeftModel.from_pretrained(model, adapter)
torch.save(model.eval()(torch.arange(3, 30)[None]).logits.detach(), out)
"""


def plain_logits(base: Path, adapter: Path | None, out: Path) -> torch.Tensor:
    """Logits in a fresh process that knows nothing of this package."""
    command = [sys.executable, "-c", LOAD_PLAINLY, str(base), str(adapter or ""), str(out)]
    subprocess.run(command, check=True, cwd=out.parent)
    logits: torch.Tensor = torch.load(out)
    return logits


def disturb(model: Any) -> torch.Tensor:
    """Move everything that trains away from its start, and give the logits then."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
        logits: torch.Tensor = model.eval()(IDS).logits
    return logits


def test_adapter_loads_in_a_fresh_process_with_equal_logits(tmp_path: Path) -> None:
    base = make_model_folder(tmp_path / "base")
    model = add_adapters(load(str(base), torch.float32), AdapterSpec(r=4, alpha=8))
    expected = disturb(model)
    save(model, tmp_path / "adapter", None, writes=True, labels=["no", "yes"])
    assert json.loads((tmp_path / "adapter" / "labels.json").read_text()) == ["no", "yes"]  # as a classifier's
    names = {file.name for file in (tmp_path / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base.resolve())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")
    assert any(name.endswith("q_proj") for name in config["target_modules"])
    torch.testing.assert_close(
        plain_logits(base, tmp_path / "adapter", tmp_path / "logits"), expected, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.slow), False], ids=["tied", "untied"])
def test_a_model_trained_in_full_is_a_whole_folder(tmp_path: Path, tied: bool) -> None:
    model = load(str(make_model_folder(tmp_path / "base", tied=tied)), torch.float32)
    expected = disturb(model)
    save(model, tmp_path / "model", make_tokenizer(), writes=True)
    logits = plain_logits(tmp_path / "model", None, tmp_path / "logits")
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert (tmp_path / "model" / "tokenizer.json").is_file()


def save_sharded(base: Path, out: Path, lora: bool) -> list[list[float]] | None:
    """Save from two shards; the logits before sharding, on the rank that wrote."""
    from torch.distributed.fsdp import fully_shard

    model: Any = load(str(base), torch.float32)
    model = add_adapters(model, AdapterSpec(r=4)) if lora else model
    logits = disturb(model)
    for layer in model.get_decoder().layers:
        fully_shard(layer)
    fully_shard(model)
    first = torch.distributed.get_rank() == 0
    save(model, out, make_tokenizer(), writes=first)
    return logits.tolist() if first else None


@pytest.mark.parametrize("lora", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["lora", "full"])
def test_a_sharded_model_is_saved_whole(tmp_path: Path, lora: bool) -> None:
    base = make_model_folder(tmp_path / "base")
    expected, _ = run_ranks(2, save_sharded, base, tmp_path / "out", lora)
    loaded = plain_logits(base if lora else tmp_path / "out", tmp_path / "out" if lora else None, tmp_path / "logits")
    torch.testing.assert_close(loaded, torch.tensor(expected), rtol=0, atol=1e-5)


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "result"
    with whole_folder(target) as folder:
        (folder / "a").write_text("first")
    with pytest.raises(FileNotFoundError), whole_folder(target) as folder:
        (folder / "half").rename(folder / "written")
    assert (target / "a").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["result"]
    with whole_folder(target) as folder:
        (folder / "b").write_text("third")
    assert [path.name for path in target.iterdir()] == ["b"]


def test_bf16_true_loads_the_base_in_bf16_and_adapters_in_fp32(tmp_path: Path) -> None:
    module = CausalLM(str(make_model_folder(tmp_path / "base")), lora=AdapterSpec(r=4))
    module.trainer = Trainer(accelerator="cpu", precision="bf16-true", logger=False, enable_checkpointing=False)
    module.configure_model()
    types = {(parameter.requires_grad, parameter.dtype) for parameter in module.parameters()}
    assert types == {(False, torch.bfloat16), (True, torch.float32)}
