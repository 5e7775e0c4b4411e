"""The command from end to end on a tiny model, and what it says to bad input."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import make_model_folder, write_pairs

from lightning_shard.cli.finetune import BAD_INPUT, DONE, HONEST_NO, main
from lightning_shard.finetune.checks import settle_world
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
    assert "Train       16 of 16 rows" in printed
    assert re.search(r"Validation loss +\d\.\d{4} before, \d\.\d{4} after \([+-]\d+\.\d%\)", printed)
    assert printed.count("Question") == 2
    assert "1 optimizer steps" in printed
    assert re.search(r"merge it +lightning-shard export", printed)
    assert re.search(r"Draw the run +lightning-shard report", printed)
    assert "Epoch 0 " in printed
    assert "/-2" not in printed  # epochs without an end


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
        (["--data.train", "absent.jsonl"], r"no data file 'absent.jsonl'.*Give a JSONL, Parquet or CSV file"),
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


def broken_models(folder: Path) -> None:
    """Copies of the model, each with one fault."""
    import shutil

    from safetensors.torch import load_file, save_file

    names = ("no-json", "bad-weights", "bad-tokenizer", "unknown-type", "half", "other-shape")
    no_json, weights, tokenizer, unknown, half, shape = (
        Path(shutil.copytree(folder / "model", folder / name)) for name in names
    )
    (no_json / "config.json").write_text("{not json")
    (weights / "model.safetensors").write_bytes(b"garbage")
    (tokenizer / "tokenizer.json").write_text("{}")
    (unknown / "config.json").write_text('{"model_type": "nothing"}')
    tensors, name = load_file(folder / "model" / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    save_file({**tensors, name: tensors[name][:8].clone()}, shape / "model.safetensors", metadata={"format": "pt"})
    del tensors[name]
    save_file(tensors, half / "model.safetensors", metadata={"format": "pt"})


BAD_VALUES = [
    ("--data.max_seq_len", "-4", r"data\.max_seq_len=-4 must be 1 or more"),
    ("--data.max_train_rows", "-1", r"data\.max_train_rows=-1 must be 1 or more"),
    ("--data.max_validation_rows", "0", r"data\.max_validation_rows=0 must be 1 or more"),
    ("--data.micro_batch_size", "0", r"data\.micro_batch_size=0 must be 1 or more"),
    ("--data.global_batch_size", "-2", r"data\.global_batch_size=-2 must be 1 or more"),
    ("--data.num_workers", "-1", r"data\.num_workers=-1 must be 0 or more"),
    ("--data.validation_share", "0.5", r"validation and validation_share exclude one another"),
    ("--data.columns", "{prompt: question}", r"line 1: has no column 'question'"),
    ("--data.train", "nobody/nothing", r"The data 'nobody/nothing' cannot be read"),
    ("--model.warmup_steps", "-3", r"model\.warmup_steps=-3 must be 0 or more"),
    ("--model.weight_decay", "-0.1", r"model\.weight_decay=-0\.1 must be 0 or more"),
    ("--model.learning_rate", "-1", r"model\.learning_rate=-1\.0 must be 0 or more"),
    ("--model.lora.r", "0", r"finetune: model\.lora: r=0 must be a whole number, 1 or more\.$"),
    ("--model.lora.dropout", "2", r"finetune: model\.lora: dropout=2\.0 must be at least 0 and below 1\.$"),
    ("--model.lora.alpha", "-1", r"model\.lora: alpha=-1.* must be a number above 0"),
    ("--model.lora.modules_to_save", '["nothing"]', r"modules_to_save 'nothing' match no layer.*lm_head"),
    ("--model.loss", "liger", r"model\.loss=liger needs a GPU"),
    ("--model.path", "no-json", r"no-json' cannot be loaded"),
    ("--model.path", "bad-weights", r"bad-weights' cannot be loaded"),
    ("--model.path", "bad-tokenizer", r"bad-tokenizer' cannot be loaded"),
    ("--model.path", "unknown-type", r"unknown-type' cannot be loaded"),
    ("--model.path", "half", r"half' lacks weights of its LlamaForCausalLM: model\.layers\.0\.mlp\.up_proj\.weight\."),
    ("--model.path", "other-shape", r"other-shape' cannot be loaded"),
    ("--trainer.max_steps", "-5", r"`max_steps` must be a non-negative integer or -1"),
    ("--trainer.devices", "0", r"devices='0'"),
    ("--trainer.accelerator", "gpu", r"No supported gpu backend"),
    ("--trainer.accumulate_grad_batches", "0", r"trainer\.accumulate_grad_batches=0 must be 1 or more"),
    ("--trainer.gradient_clip_val", "-1", r"trainer\.gradient_clip_val=-1 must be 0 or more"),
    ("--cpu_processes", "0", r"cpu_processes=0 must be 1 or more"),
    ("--resume", "absent.ckpt", r"--resume 'absent\.ckpt' does not exist"),
    ("--task", "clasification", r"'clasification' is not known. Did you mean 'text-classification'"),
    ("--config", "absent.yaml", r"There is no recipe 'absent\.yaml'"),
]


@pytest.mark.parametrize(("option", "value", "said"), BAD_VALUES, ids=lambda value: str(value)[:40])
def test_a_bad_value_is_one_message_and_leaves_nothing_behind(
    recipe: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    value: str,
    said: str,
) -> None:
    if (option, torch.cuda.is_available()) in (("--trainer.accelerator", True), ("--model.loss", True)):
        pytest.skip("there is a GPU")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    if option == "--model.path":
        broken_models(tmp_path)
        value = str(tmp_path / value)
    assert main([*recipe, option, value]) == BAD_INPUT
    message = capsys.readouterr().err
    assert re.search(said, message, re.MULTILINE)
    assert "Traceback" not in message
    assert list((tmp_path / "here").iterdir()) == []


def test_nothing_is_left_in_the_working_directory(
    recipe: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main([*recipe, "--json", "--trainer.max_steps", "1"]) == DONE
    assert list((tmp_path / "here").iterdir()) == []
    assert (tmp_path / "out" / "recipe.yaml").is_file()


def test_a_runs_recipe_gives_the_same_run(
    recipe: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*recipe, "--json", "--data.global_batch_size", "6", "--data.micro_batch_size", "null"]) == DONE
    first = outcome(capsys)
    assert main(["--config", str(tmp_path / "out" / "recipe.yaml")]) == DONE
    again = outcome(capsys)
    assert first["batch"]["rows"] == again["batch"]["rows"] == 6
    assert first["val_loss_after"] == again["val_loss_after"]


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


def test_without_arguments_it_says_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == BAD_INPUT
    assert "--config recipes/quickstart.yaml" in capsys.readouterr().err


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


def settled(environment: dict[str, str], **asked: Any) -> tuple[Any, Any]:
    """Nodes and devices of a recipe that two processes are asked for, started with those variables."""
    trainer = SimpleNamespace(**{"accelerator": "cpu", "devices": "auto", "num_nodes": 1, **asked})
    settle_world(trainer, 2, environment)
    return trainer.num_nodes, trainer.devices


def test_an_error_about_a_key_is_not_hidden_below_all_keys(
    recipe: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*recipe, "--data.trian", "x"])
    assert ended.value.code == BAD_INPUT
    said = capsys.readouterr().err
    assert "--data.trian" in said
    assert len(said.splitlines()) < 8
    assert "lightning-shard finetune --help" in said


def test_a_gpu_run_takes_all_gpus_and_a_cpu_run_the_processes_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settled({}) == (1, 2)
    assert settled({}, devices=3) == (1, 3)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert settled({}, accelerator="auto") == (1, "auto")


TORCHRUN = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
SLURM = {"SLURM_NTASKS": "16", "SLURM_NTASKS_PER_NODE": "8", "SLURM_JOB_NAME": "tune"}


@pytest.mark.parametrize("environment", [TORCHRUN, SLURM], ids=["torchrun", "slurm"])
def test_nodes_and_devices_are_those_that_were_launched(environment: dict[str, str]) -> None:
    assert settled(environment) == (2, 8)
    assert settled(environment, num_nodes=2, devices=8) == (2, 8)
    assert settled(environment, devices="8") == (2, 8)
    with pytest.raises(ValueError, match=r"trainer.num_nodes=4, but the launcher .* started 2 nodes with 8 processes"):
        settled(environment, num_nodes=4)
    with pytest.raises(ValueError, match="trainer.devices=4, but the launcher"):
        settled(environment, devices=4)


def test_slurm_tasks_without_a_number_per_node_are_an_error() -> None:
    with pytest.raises(ValueError, match="--ntasks-per-node"):
        settled({"SLURM_NTASKS": "16", "SLURM_JOB_NAME": "tune"})
