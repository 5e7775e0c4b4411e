"""Every recipe and script under recipes/, and the Makefile, stay true to the code."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import make_model_folder, write_pairs

from lightning_shard.cli.finetune import DONE

ROOT = Path(__file__).parents[2]
RECIPES = sorted(
    file for file in (ROOT / "recipes").rglob("*.yaml") if file.parent.name != "k8s"
)  # those are manifests


def test_there_are_recipes() -> None:
    assert "quickstart" in [recipe.stem for recipe in RECIPES]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_says_what_it_needs_how_to_launch_it_and_what_to_expect(recipe: Path) -> None:
    header = recipe.read_text().partition("\n\n")[0]
    for word in ("# Needs:", "# Launch:", "torchrun", "SLURM", "# Expect:", f"recipes/{recipe.name}"):
        assert word in header


@pytest.mark.parametrize("script", ["get_smollm2.py", "get_docs_pairs.py"])
def test_a_script_leaves_alone_what_is_there(script: str, tmp_path: Path) -> None:
    target = tmp_path / "there"
    target.mkdir()
    command = [sys.executable, str(ROOT / "recipes" / script), "--to", str(target)]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == ""
    assert list(target.iterdir()) == []


@pytest.mark.slow
def test_the_command_starts_its_own_processes(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "model")
    data = write_pairs(tmp_path / "data.jsonl", 8)
    command = [
        sys.executable,
        "-m",
        "lightning_shard",
        "finetune",
        "--config",
        str(ROOT / "recipes" / "quickstart.yaml"),
    ]
    tiny = ["--model.path", str(model), "--data.train", str(data), "--data.validation", str(data), "--prepare", "[]"]
    options = ["--trainer.accelerator", "cpu", "--trainer.max_steps", "2"]
    done = subprocess.run([*command, *tiny, *options], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == DONE, done.stderr
    assert "Plan: dp_replicate=2" in done.stdout
    assert (tmp_path / "runs" / "quickstart" / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(("torch", "first"), [("cpu", True), ("newest", False)])
def test_make_installs_torch_first_only_where_a_cpu_build_is_asked_for(torch: str, first: bool, tmp_path: Path) -> None:
    command = ["make", "-n", "quickstart", f"TORCH={torch}", f"VENV={tmp_path}/venv"]
    outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "ARGS")  # of the make that runs these tests
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    steps = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, env=environment).stdout
    assert ("torch==2.13.0" in steps) is first
    assert steps.rstrip().endswith("lightning-shard finetune --config recipes/quickstart.yaml")
