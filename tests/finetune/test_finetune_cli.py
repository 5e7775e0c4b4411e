"""The command from end to end on a tiny model, and what it says to bad input."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_model_folder, write_pairs

from lightning_shard.cli.finetune import BAD_INPUT, DONE, HONEST_NO, main
from lightning_shard.testing import run_ranks

RECIPE = """
model:
  path: {folder}/model
  lora: {{r: 4, alpha: 8}}
  learning_rate: 1.0e-2
data:
  train: {folder}/train.jsonl
  validation: {folder}/validation.jsonl
  max_seq_len: 64
  micro_batch_size: 2
trainer:
  strategy: auto
  accelerator: cpu
  max_steps: 6
  num_sanity_val_steps: 0
  enable_checkpointing: false
  logger: false
  default_root_dir: {folder}/out
"""


@pytest.fixture
def recipe(tmp_path: Path) -> list[str]:
    make_model_folder(tmp_path / "model")
    write_pairs(tmp_path / "train.jsonl", 16)
    write_pairs(tmp_path / "validation.jsonl", 5)
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(folder=tmp_path))
    return ["--config", str(tmp_path / "recipe.yaml")]


def outcome(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def test_a_recipe_runs_from_end_to_end(
    recipe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    assert main([*recipe, "--json"]) == DONE
    result = outcome(capsys)
    assert result["steps"] == 6
    assert result["val_loss_after"] < result["val_loss_before"]
    assert [sample["question"] for sample in result["samples"]] == ["what is 0?", "what is 1?"]
    assert all(isinstance(sample["answer"], str) for sample in result["samples"])
    assert result["adapter"] == str(tmp_path / "out" / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tuned = PeftModel.from_pretrained(base, result["adapter"])
    assert all(parameter.abs().max() > 0 for name, parameter in tuned.named_parameters() if "lora_B" in name)


def test_what_people_see(recipe: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*recipe, "--trainer.max_steps", "1"]) == DONE
    printed = capsys.readouterr().out
    assert "Strategy: SingleDeviceStrategy, which has no plan." in printed
    assert "Train: 16 of 16 rows" in printed
    assert re.search(r"Validation loss +\d\.\d{4} before, \d\.\d{4} after \([+-]\d+\.\d%\)", printed)
    assert printed.count("Question") == 2
    assert "1 optimizer steps" in printed


def test_full_fine_tuning_writes_a_whole_model(
    recipe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*recipe, "--json", "--model.lora", "null", "--trainer.max_steps", "2"]) == DONE
    folder = Path(outcome(capsys)["model"])
    assert folder == tmp_path / "out" / "model"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in folder.iterdir()}


@pytest.mark.parametrize("key", ["text", "messages"])
def test_other_kinds_of_rows(recipe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str) -> None:
    turns = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "a list"}]
    rows = [{key: "a list is a list" if key == "text" else turns * 2}] * 4
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    validation = ["--data.validation", str(tmp_path / "train.jsonl")]
    assert main([*recipe, *validation, "--json"]) == DONE
    result = outcome(capsys)
    assert result["val_loss_after"] < result["val_loss_before"]
    assert [sample["reference"] for sample in result["samples"]] == ([] if key == "text" else ["a list"] * 2)


def run_under_torchrun(arguments: list[str]) -> int:
    return main(arguments)


@pytest.mark.parametrize("strategy", ["ddp", "auto-shard", "fsdp2"])
def test_ranks_started_by_torchrun(recipe: list[str], tmp_path: Path, strategy: str) -> None:
    arguments = [*recipe, "--json", "--trainer.strategy", strategy]
    assert run_ranks(2, run_under_torchrun, arguments) == [DONE, DONE]
    assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").is_file()


def test_full_fine_tuning_on_shards(recipe: list[str], tmp_path: Path) -> None:
    arguments = [*recipe, "--json", "--trainer.strategy", "fsdp2", "--model.lora", "null"]
    assert run_ranks(2, run_under_torchrun, arguments) == [DONE, DONE]
    assert (tmp_path / "out" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--trainer.strategy", "auto-shrad"], r"'auto-shrad' is not known. Did you mean 'auto-shard'\?.*tuned-ddp"),
        (["--model.path", "./absent/model"], r"'./absent/model' does not exist.*config.json.*hub id"),
        (["--data.train", "absent.jsonl"], r"no data file 'absent.jsonl'.*Give the path of a JSONL file"),
        (["--prepare", '["absent.py"]'], r"'absent.py', which does not exist.*--prepare \[\]"),
    ],
    ids=["strategy", "model", "data", "prepare"],
)
def test_bad_input_is_told_before_anything_starts(
    recipe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], change: list[str], said: str
) -> None:
    assert main([*recipe, *change]) == BAD_INPUT
    message = capsys.readouterr().err
    assert re.search(said, message)
    assert "Traceback" not in message
    assert not (tmp_path / "out").exists()


def test_a_broken_line_is_told_before_anything_starts(
    recipe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write('{"prompt": "half\n')
    assert main(recipe) == BAD_INPUT
    assert f"{tmp_path}/train.jsonl, line 17: not JSON" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_without_a_model_is_told(
    recipe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*recipe, "--model.path", str(tmp_path)]) == BAD_INPUT
    assert "holds no config.json" in capsys.readouterr().err


def test_a_hub_id_that_nobody_answers_for_is_told_in_time(
    recipe: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main([*recipe, "--model.path", "nobody/nothing"]) == BAD_INPUT
    assert "'nobody/nothing' is no folder here" in capsys.readouterr().err


def test_a_model_without_weights_is_told(recipe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model" / "model.safetensors").unlink()
    assert main(recipe) == BAD_INPUT
    assert re.search(r"cannot be loaded: .*model.safetensors", capsys.readouterr().err)


def test_adapters_that_match_nothing_are_told(recipe: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*recipe, "--model.lora.target_modules", '["query"]']) == BAD_INPUT
    assert re.search(r"'query' match no layer.*q_proj", capsys.readouterr().err)


def test_a_script_that_fails_ends_the_run(
    recipe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    assert main([*recipe, "--prepare", f'["{tmp_path}/fails.py"]']) == HONEST_NO
    assert "exit code 3" in capsys.readouterr().err


def test_unknown_keys_are_told(recipe: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*recipe, "--model.lora_rank", "3"])
    assert ended.value.code == BAD_INPUT


def test_a_gpu_run_takes_all_gpus_and_a_cpu_run_the_processes_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_shard.finetune.checks import num_devices

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert num_devices("cpu", 2) == 2
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert num_devices("auto", 2) == "auto"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert num_devices("auto", 2) == 4
