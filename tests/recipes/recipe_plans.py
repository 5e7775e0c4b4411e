"""What the planner says to each recipe: the lines ``# Plan:`` of its header.

python tests/recipes/recipe_plans.py      writes them anew
"""

import re
from pathlib import Path
from typing import Any

import yaml

from lightning_shard.finetune.batching import choose_micro_batch
from lightning_shard.hardware import Cluster, find_device, link_between_nodes, link_inside_node
from lightning_shard.planner import Decision, choose
from lightning_shard.specs import AdapterSpec, ModelSpec, TrainSpec

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
CONFIGS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": "tests/planner/configs/smollm2-135m",
    "meta-llama/Llama-3.1-8B-Instruct": "tests/planner/configs/llama-3.1-8b",
    "meta-llama/Llama-3.3-70B-Instruct": "tests/recipes/configs/llama-3.3-70b",
    "Qwen/Qwen3-8B": "tests/recipes/configs/qwen3-8b",
    "Qwen/Qwen3-32B": "tests/recipes/configs/qwen3-32b",
    "mistralai/Mistral-7B-v0.3": "tests/planner/configs/mistral-7b",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "tests/planner/configs/mixtral-8x7b",
    "google/gemma-3-1b-it": "tests/recipes/configs/gemma-3-1b",
    "google-bert/bert-base-uncased": "tests/planner/configs/bert-base",
    "google/vit-base-patch16-224-in21k": "tests/planner/configs/vit-base",
    "recipes/configs/llama-100m": "recipes/configs/llama-100m",
    "runs/models/SmolLM2-135M-Instruct": "tests/planner/configs/smollm2-135m",
}
"""The published config.json of every model that a recipe names."""

LINE = re.compile(r"^# Plan: +(\d+) x ([\w-]+)(?:: (\w+), ([\d.]+) GiB each, micro-batch (\d+))?.*$", re.MULTILINE)


def read(recipe: Path) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(recipe.read_text())
    return values


def decide(recipe: Path, devices: int, device: str) -> tuple[int, Decision]:
    """Micro-batch and decision on one node."""
    values = read(recipe)
    model, data, trainer = values["model"], values["data"], values["trainer"]
    precision = trainer["precision"]
    lora = model.get("lora")
    train = TrainSpec(
        seq_len=data.get("max_seq_len", 1),
        micro_batch_size=data.get("micro_batch_size") or 1,
        precision=precision,
        adapter=None if lora is None else AdapterSpec(**lora),
        optimizer_implementation="fused",
        loss="chunked" if values.get("task", "causal-lm") == "causal-lm" else "full",
        gradients_cleared="before_backward",
    )
    spec = ModelSpec.from_pretrained(ROOT / CONFIGS[model["path"]])
    spec = spec.with_storage("bfloat16" if precision == "bf16-true" else "float32")
    row = find_device(device)
    assert row is not None
    cluster = Cluster(
        devices_per_node=devices,
        device=row,
        intra_link=link_inside_node(row.intra_link),
        inter_link=link_between_nodes(row.intra_link),
        accelerator="gpu",
    )
    if data.get("micro_batch_size"):
        return train.micro_batch_size, choose(spec, train, cluster)
    return choose_micro_batch(spec, train, cluster, data["global_batch_size"])


def line(devices: int, device: str, micro: int, decision: Decision) -> str:
    size = decision.estimate.device_bytes / 2**30
    kind = decision.plan.strategy
    return f"# Plan:     {devices} x {device}: {kind}, {size:.1f} GiB each, micro-batch {micro}"


def rewrite(recipe: Path) -> None:
    def fresh(match: re.Match[str]) -> str:
        devices, device = int(match[1]), match[2]
        micro, decision = decide(recipe, devices, device)
        print(recipe.stem, decision.fits, line(devices, device, micro, decision), decision.plan.to_json())
        return line(devices, device, micro, decision)

    recipe.write_text(LINE.sub(fresh, recipe.read_text()))


if __name__ == "__main__":
    for one in RECIPES:
        rewrite(one)
