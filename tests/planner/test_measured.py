"""Published measured figures against the plan command, options and all.

The rows come from fms-acceleration (HF Trainer), litgpt and torchtitan; the command estimates transformers'
own step. Options say what the code that ran did differently (no FP32 masters, plain peft's FP32 adapters, a
loss that copies or keeps its logits): nothing is fitted. litgpt's multi-device rows are left out: their peak is
the whole model that every rank holds while it loads.
"""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from lightning_shard.cli import main
from lightning_shard.specs import ModelSpec

HERE = Path(__file__).parent
ROWS: list[dict[str, Any]] = json.loads((HERE / "measured_rows.json").read_text())
CONFIGS: dict[str, dict[str, Any]] = json.loads((HERE / "measured_configs.json").read_text())
PLAIN = ["reshard_after_forward=true", "resident_blocks=0", "adapters=sharded", "offload=none"]


@pytest.fixture(scope="module")
def specs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved spec of every model that a row names."""
    folder = tmp_path_factory.mktemp("specs")
    for name, config in CONFIGS.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        ModelSpec.from_pretrained(folder / name).save(folder / f"{name}.json")
    return folder


def estimate(row: dict[str, Any], specs: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What the command says of a row."""
    pins = [*PLAIN, f"activation_checkpoint={'full' if row['recompute'] else 'none'}"]
    options = [option for pin in pins for option in ("--pin", pin)]
    arguments = ["--model", str(specs / f"{row['model']}.json"), *row["arguments"].split(), *options]
    code = main(["plan", *arguments, "--headroom", "0.05", "--json"])
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (code == 0) == answer["fits"]
    return answer


def test_allocated_bytes(specs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    errors = {}
    for row in ROWS:
        answer = estimate(row, specs, capsys)
        errors[row["id"]] = answer["estimate"]["allocated_bytes"] / 1e9 / row["allocated_gb"] - 1
        assert answer["fits"], f"{row['id']} ran"
    sizes = [abs(error) for error in errors.values()]
    assert statistics.median(sizes) <= 0.04, errors
    assert max(sizes) <= 0.12, errors


def test_device_bytes_against_nvidia_smi(specs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    errors = {}
    for row in ROWS:
        if row["nvidia_smi_mib"]:
            device = estimate(row, specs, capsys)["estimate"]["device_bytes"]
            errors[row["id"]] = device / (row["nvidia_smi_mib"] * 2**20) - 1
    sizes = [abs(error) for error in errors.values()]
    assert len(sizes) == 11
    assert statistics.median(sizes) <= 0.10, errors
    assert max(sizes) <= 0.15, errors


L1 = [(1, 4, 26_704_571_904, 14_664_493_056), (1, 8, 38_742_912_512, 14_664_886_272),
      (2, 2, 15_144_870_400, 7_368_030_720), (2, 4, 21_959_827_968, 7_368_227_328)]  # fmt: skip


@pytest.mark.parametrize(("devices", "batch", "peak_bytes", "loaded_bytes"), L1)
def test_mistral_with_lora_as_published(
    devices: int, batch: int, peak_bytes: int, loaded_bytes: int, specs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """L1: peaks, and what is there after loading. On two devices FSDP1 ran, which our FSDP2 does not describe as well."""
    row = next(row for row in ROWS if row["id"] == "FMS-Mistral-7B-v0.1-lora-1g-b8-none")
    sharded = f" --devices 2 --pin dp_shard={devices}" if devices > 1 else ""
    arguments = row["arguments"].replace("--micro-batch-size 8", f"--micro-batch-size {batch}") + sharded
    answer = estimate({**row, "arguments": arguments}, specs, capsys)
    terms = answer["estimate"]["terms"]
    assert answer["fits"]
    assert answer["estimate"]["allocated_bytes"] == pytest.approx(peak_bytes, rel=0.01 if devices == 1 else 0.12)
    after_loading = terms["frozen_weights"] + terms["trained_weights"] + terms["optimizer_state"]
    assert after_loading == pytest.approx(loaded_bytes, rel=0.02)


def test_an_update_may_take_what_backward_left(specs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """fms-acceleration's Mistral-7B in full ran at batch 8 on one A100-80 (74,383 MiB of nvidia-smi), as at batch 4:
    before the update the allocator gives back what the longer batch left. A device that live tensors overfill is no fit.
    """
    row = next(row for row in ROWS if row["id"] == "FMS-Mistral-7B-v0.1-full-2g-b4-none")
    arguments = row["arguments"].replace(" --devices 2 --pin dp_shard=2", "").replace("-size 4", "-size 8")
    answer = estimate({**row, "arguments": arguments}, specs, capsys)
    assert answer["fits"]
    assert answer["estimate"]["allocated_bytes"] == pytest.approx(72_972_117_504, rel=0.01)
    assert answer["estimate"]["device_bytes"] <= answer["limit_bytes"]
    assert "gives free blocks back" in " ".join(answer["estimate"]["not_modelled"])
    full = estimate({**row, "arguments": f"{arguments} --device-memory 70GiB"}, specs, capsys)
    assert not full["fits"]
