"""The command line: exit codes, messages, the JSON contract, and no torch for a saved spec."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hand_specs import LLAMA_8B, LLAMA_70B, TINY

from lightning_shard.cli import main
from lightning_shard.plans import Plan

CONFIGS = Path(__file__).parent / "configs"


@pytest.fixture
def spec_8b(tmp_path: Path) -> str:
    LLAMA_8B.save(tmp_path / "llama-8b.json")
    return str(tmp_path / "llama-8b.json")


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = main(["plan", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_json_contract(spec_8b: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = plan(
        capsys, "--model", spec_8b, "--devices", "8", "--device", "h100-sxm", "--lora-r", "16", "--seq-len", "2048"
    )
    assert code == 0
    assert answer["decision"]["strategy"] == "ddp"
    assert Plan.from_dict(answer["decision"]["plan"]).dp_replicate == 8
    assert answer["fits"] is True
    assert answer["capacity_bytes"] == 80 * 2**30
    estimate = answer["estimate"]
    for name in ("allocated_bytes", "reserved_bytes", "device_bytes", "load_peak_bytes", "comm_bytes"):
        assert isinstance(estimate[name], int)
    assert estimate["allocated_bytes"] < estimate["reserved_bytes"] < estimate["device_bytes"]
    assert estimate["step_s"] > 0
    assert 0 <= estimate["comm_share"] < 1
    assert estimate["method"] == "analytic"
    assert estimate["not_modelled"] == []
    assert isinstance(estimate["peak_at"], str)
    assert sum(estimate["terms"].values()) == estimate["device_bytes"]
    for row in answer["rejected"]:
        assert set(row) == {"plan", "device_bytes", "step_s", "reason"}


def test_an_honest_no_is_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LLAMA_70B.save(tmp_path / "70b.json")
    code, answer = plan(capsys, "--model", str(tmp_path / "70b.json"), "--devices", "8", "--device-memory", "80GiB")
    assert code == 1
    assert answer["fits"] is False
    assert answer["decision"]["strategy"] == "fsdp2"
    assert answer["shortfall_bytes"] > 0
    assert answer["advice"]


def test_from_a_folder_with_only_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = plan(
        capsys, "--model", str(CONFIGS / "smollm2-135m"), "--devices", "2", "--device", "rtx-4090", "--seq-len", "1024"
    )
    assert code == 0
    assert answer["decision"]["strategy"] == "ddp"


def test_for_people(spec_8b: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", spec_8b, "--devices", "8", "--device", "h100-sxm", "--seq-len", "2048"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    for words in ("fsdp2 fits", "trained weights", "allocated", "usable (10% headroom)", "DDP would fit", "Not taken"):
        assert words in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "h999"], "device 'h999' is not in the hardware table"),
        (["--device-memory", "lots"], "size 'lots' is not understood"),
        (["--device-memory", "0GiB"], "must be above 0 bytes"),
        (["--devices", "0", "--device", "a100-80"], "--devices 0 must be 1 or more"),
        (["--nodes", "-1", "--device", "a100-80"], "--nodes -1 must be 1 or more"),
        (["--device", "a100-80", "--link", "string"], "link 'string' is not known"),
        (["--device", "a100-80", "--link", "ib400"], "is not a link of that kind"),
        (["--device", "a100-80", "--seq-len", "0"], "seq_len=0 must be a whole number, 1 or more"),
        (["--device", "a100-80", "--seq-len", "200000"], "beyond the 131072 positions"),
        (["--device", "a100-80", "--micro-batch-size", "-2"], "micro_batch_size=-2 must be"),
        (["--device", "a100-80", "--precision", "int3"], "precision='int3' is not supported"),
        (["--device", "a100-80", "--optimizer", "madgrad"], "optimizer='madgrad' is not known"),
        (["--device", "a100-80", "--lora-r", "8", "--lora-targets", "nope"], "matches no module"),
        (["--device", "a100-80", "--lora-targets", "q_proj"], "needs a rank"),
        (["--device", "a100-80", "--lora-r", "8", "--full"], "Give one of them"),
        (["--device", "a100-80", "--lora-r", "0"], "r=0 must be a whole number"),
        (["--device", "a100-80", "--headroom", "1.5"], "headroom=1.5"),
        (["--device", "a100-80", "--pin", "tp"], "is not KEY=VALUE"),
        (["--device", "a100-80", "--pin", "tp=2"], "tp=2 cannot be carried out: its ranks must lie inside a node"),
        (["--device", "a100-80", "--dtype", "float3"], "dtype='float3' is not known"),
        (["--device", "a100-80", "--simulate"], "runs the model's own code"),
        (["--device", "a100-80", "--links", "missing.json"], "is no link profile"),
        (["--device", "a100-80", "--calibrate", "missing.json"], "is no file of ShardMonitor"),
    ],
)
def test_bad_input_is_exit_code_2_and_one_sentence(
    spec_8b: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", spec_8b, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_missing_model_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "./nowhere", "--device", "a100-80"]) == 2
    assert "There is no model at ./nowhere" in capsys.readouterr().err


def test_unknown_commands_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dance"]) == 2
    assert "no command 'dance'. Commands: plan" in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "plan" in capsys.readouterr().out
    assert main([]) == 2
    assert main(["--version"]) == 0


def test_spec_writes_what_plan_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["spec", str(CONFIGS / "smollm2-135m")]) == 0
    (tmp_path / "smol.json").write_text(capsys.readouterr().out)
    code, answer = plan(capsys, "--model", str(tmp_path / "smol.json"), "--devices", "2", "--device", "l4")
    assert code == 0
    assert answer["fits"]


def test_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in answer["devices"]} >= {"h100-sxm", "a100-80", "mi300x", "rtx-4090"}
    assert all(row["source"] for row in (*answer["devices"], *answer["links"]))
    assert main(["devices"]) == 0
    assert "h100-sxm" in capsys.readouterr().out


def test_a_saved_spec_needs_no_torch(tmp_path: Path) -> None:
    TINY.save(tmp_path / "tiny.json")
    code = (
        "import sys; from lightning_shard.cli import main; "
        f"code = main(['plan', '--model', {str(tmp_path / 'tiny.json')!r}, '--seq-len', '128', '--devices', '4', "
        "'--device', 'l40s', '--json']); "
        "heavy = {'torch', 'lightning', 'transformers', 'peft'} & set(sys.modules); "
        "sys.exit(code or len(heavy))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300).returncode == 0
