"""Every recipe runs for two steps with its model shrunk, in this process, on one CPU rank."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from recipe_plans import CONFIGS, RECIPES, ROOT, read

from lightning_shard.cli.finetune import DONE, main

sys.path.append(str(ROOT / "tests" / "finetune"))
from tiny import make_tokenizer, write_pairs

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "sliding_window": 16,
    "image_size": 32,
    "patch_size": 8,
    "query_pre_attn_scalar": 8,
    "max_position_embeddings": 4096,
}


def shrunk(config: Path, folder: Path, *, weights: bool) -> Path:
    """The model of a config with sizes in the tens, as a folder with a tokenizer or an image processor."""
    import transformers

    values = json.loads((config / "config.json").read_text())
    values |= {name: size for name, size in SMALL.items() if name in values}
    tokenizer = make_tokenizer()
    if "vocab_size" in values:
        values |= {"vocab_size": len(tokenizer), "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 2}
        tokenizer.save_pretrained(folder)
    else:
        from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

        ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(values))
    if weights:
        loaded = transformers.AutoConfig.from_pretrained(folder)
        getattr(transformers, values["architectures"][0])(loaded).save_pretrained(folder)
    return folder


def images(folder: Path) -> Path:
    from PIL import Image

    for split in ("train", "validation"):
        for label, colour in (("red", (200, 20, 20)), ("blue", (20, 20, 200))):
            (folder / split / label).mkdir(parents=True)
            for number in range(3):
                Image.new("RGB", (40 + number, 36), colour).save(folder / split / label / f"{number}.png")
    return folder


def texts(file: Path) -> Path:
    file.write_text("".join(json.dumps({"text": f"it is {i}", "label": i % 2}) + "\n" for i in range(8)))
    return file


def data_options(recipe: dict[str, Any], folder: Path) -> list[str]:
    """The recipe's own form of data, on rows made here."""
    task, data = recipe.get("task", "causal-lm"), recipe["data"]
    if task == "image-classification":
        return ["--data.train", str(images(folder / "images")), "--data.num_workers", "0"]
    if task == "text-classification":
        return ["--data.train", str(texts(folder / "rows.jsonl")), "--data.validation_split", "train"]
    rows = folder / "rows.jsonl"
    columns = data.get("columns")
    if columns is None:
        return ["--data.train", str(write_pairs(rows, 60)), "--data.validation", str(rows)]
    rows.write_text("".join(json.dumps(dict.fromkeys(columns.values(), f"a list of {i}")) + "\n" for i in range(60)))
    return ["--data.train", str(rows), "--data.subset", "null"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_runs_two_steps_with_its_model_shrunk(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    values = read(recipe)
    model = shrunk(ROOT / CONFIGS[values["model"]["path"]], tmp_path / "model", weights=True)
    smaller = {"max_seq_len": 64, "global_batch_size": 4, "shuffle_buffer": 8}
    options = [f"--data.{name}={size}" for name, size in smaller.items() if name in values["data"]]
    options += ["--data.micro_batch_size=2"] if values["data"].get("micro_batch_size") else []
    options += ["--processor", str(model)] if "processor" in values else []
    short = ["--trainer.devices", "1", "--trainer.accelerator", "cpu", "--trainer.max_steps", "2", "--prepare", "[]"]
    arguments = ["--config", str(recipe), "--model.path", str(model), *data_options(values, tmp_path), *options, *short]
    assert main([*arguments, "--json"]) == DONE
    result = json.loads(capsys.readouterr().out)
    assert result["steps"] == 2
    assert result["batch"]["rows"] in (2, 4)
    assert Path(result["adapter" if "lora" in values["model"] else "model"]).is_dir()
    assert sorted(file.name for file in tmp_path.iterdir() if file.suffix == ".yaml") == []


def test_a_recipe_runs_from_the_script_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import runpy

    monkeypatch.chdir(tmp_path)
    model = shrunk(ROOT / CONFIGS["runs/models/SmolLM2-135M-Instruct"], tmp_path / "model", weights=True)
    rows = str(write_pairs(tmp_path / "rows.jsonl", 8))
    options = ["--model.path", str(model), "--data.train", rows, "--data.validation", rows, "--prepare", "[]", "--json"]
    short = ["--trainer.devices", "1", "--trainer.accelerator", "cpu", "--trainer.max_steps", "1"]
    script = str(ROOT / "recipes" / "train.py")
    monkeypatch.setattr(sys, "argv", [script, "--config", str(ROOT / "recipes" / "quickstart.yaml"), *options, *short])
    runpy.run_path(script, run_name="__main__")
    assert (tmp_path / "runs" / "quickstart" / "adapter" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "runs" / "quickstart" / "recipe.yaml").is_file()
