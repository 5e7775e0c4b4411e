"""Published measured figures, and what the plan command says of the jobs they come from.

``published.csv`` holds the figures with their sources. How each job is put to ``lightning-shard plan`` stands in
``tests/planner/measured_rows.json`` for those that the command describes in full, and in ``published_extra.json``
for the rest, with the reason why they are shown but not counted.
"""

import contextlib
import csv
import io
import json
import re
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.results import HERE
from lightning_shard.cli import main as command
from lightning_shard.specs import ModelSpec

PLANNER_TESTS = HERE.parent / "tests" / "planner"
PLAIN = (
    "reshard_after_forward=true",
    "resident_blocks=0",
    "adapters=sharded",
    "offload=none",
    "defer_gradient_sync=false",
)
"""Pins of what the jobs' tools do, where a row does not say otherwise."""
FIT_HEADROOM = 0.05
"""Above 95 % of a device nothing is called a fit."""
LLAMA_2_13B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 5120, "num_hidden_layers": 40,
    "num_attention_heads": 40, "num_key_value_heads": 40, "intermediate_size": 13824, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Published:
    """One published figure and the job behind it."""

    id: str
    source: str
    measured_gb: float
    measured_as: str
    """The figure's name at its source."""
    sharding: str
    """What the run's tool calls it."""
    nvidia_smi_bytes: int | None
    model: str
    arguments: str | None
    """Of the plan command; None where no plan describes the job."""
    recompute: bool
    metric: str
    left_out: str
    """Why the row is not counted; empty for those that are."""

    @property
    def pins(self) -> list[str]:
        """What the job did, whatever would be faster."""
        recompute = f"activation_checkpoint={'full' if self.recompute else 'none'}"
        given = {pin.partition("=")[0] for pin in re.findall(r"--pin (\S+)", self.arguments or "")}
        pins = [pin for pin in (*PLAIN, recompute) if pin.partition("=")[0] not in given]
        return [option for pin in pins for option in ("--pin", pin)]


def published() -> list[Published]:
    """All rows, in the order of the file."""
    told = {row["id"]: row for name in ("measured_rows", "published_extra") for row in _json(name)}
    with (HERE / "published.csv").open(newline="") as lines:
        return [_row(row, told[row["id"]]) for row in csv.DictReader(lines)]


def _json(name: str) -> list[dict[str, Any]]:
    folder = HERE if name == "published_extra" else PLANNER_TESTS
    return json.loads((folder / f"{name}.json").read_text())


def _row(row: dict[str, str], told: dict[str, Any]) -> Published:
    smi = re.search(r"nvidia-smi used (\d+) MiB", row["notes"])
    return Published(
        id=row["id"],
        source=row["source"],
        measured_gb=float(row["measured_GB"]),
        measured_as=row["metric"],
        sharding=row["sharding"],
        nvidia_smi_bytes=int(smi[1]) * 2**20 if smi else None,
        model=told["model"],
        arguments=told.get("arguments"),
        recompute=told.get("recompute", False),
        metric=told.get("metric", "allocated_bytes"),
        left_out=told.get("left_out", ""),
    )


class Models:
    """Folders with a config and saved specs of the rows' models, for as long as the context lasts."""

    def __enter__(self) -> "Models":
        self._folder = tempfile.TemporaryDirectory(prefix="published-")
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    @cached_property
    def _configs(self) -> dict[str, dict[str, Any]]:
        llama = json.loads((PLANNER_TESTS / "configs" / "llama-3.1-8b" / "config.json").read_text())
        known = json.loads((PLANNER_TESTS / "measured_configs.json").read_text())
        return {**known, "llama-2-13b": LLAMA_2_13B, "llama-3.1-8b": llama}

    def folder(self, name: str) -> Path | None:
        """A folder with the model's config; None for a model that transformers does not have."""
        if name == "lightning-demo":
            return None
        path = Path(self._folder.name, name)
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(self._configs[name]))
        return path

    def spec(self, name: str) -> Path:
        """The model's saved spec."""
        path = Path(self._folder.name, f"{name}.json")
        if not path.exists():
            self.read(name).save(path)
        return path

    def read(self, name: str) -> ModelSpec:
        folder = self.folder(name)
        return lightning_demo() if folder is None else ModelSpec.from_pretrained(folder)


def lightning_demo() -> ModelSpec:
    """The model of Lightning's FSDP guide, 1.009 billion parameters."""
    import torch
    from lightning.pytorch.demos import Transformer

    with torch.device("meta"):
        return ModelSpec.from_module(Transformer(nlayers=32, nhid=4096, ninp=1024, nhead=64), name="lightning-demo")


def plan(row: Published, models: Models, *, simulate: bool = False) -> dict[str, Any]:
    """What ``lightning-shard plan --json`` answers for a row's job.

    Raises:
        RuntimeError: when the command refuses it; its message says why.
    """
    assert row.arguments is not None
    model = models.folder(row.model) if simulate else models.spec(row.model)
    arguments = [
        "plan",
        "--model",
        str(model),
        *row.arguments.split(),
        *row.pins,
        "--headroom",
        str(FIT_HEADROOM),
        "--json",
    ]
    out, refused = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(refused):
        code = command([*arguments, "--simulate"] if simulate else arguments)
    if code not in (0, 1):
        raise RuntimeError(f"{row.id}: {refused.getvalue().strip()}")
    answer: dict[str, Any] = json.loads(out.getvalue())
    return answer
