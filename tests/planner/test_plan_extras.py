"""What the plan command takes from measurements, checks by simulation and draws."""

import json
from pathlib import Path

import pytest
from hand_specs import GIB, LLAMA_8B, cluster

from lightning_shard.cli import main
from lightning_shard.cli.plot import save_plot, stacked_bars
from lightning_shard.hardware import LinkProfile
from lightning_shard.hardware.profile import Timing, fit_link
from lightning_shard.planner import Calibration, choose
from lightning_shard.specs import AdapterSpec, TrainSpec

CONFIGS = Path(__file__).parent / "configs"
TRAIN = TrainSpec(seq_len=512, adapter=AdapterSpec(r=16))


def monitor_file(folder: Path, *, step_ratio: float, residual_bytes: int) -> str:
    estimate = choose(LLAMA_8B, TRAIN, cluster()).estimate
    record = {
        "estimate": estimate.to_dict(),
        "measured": {
            "step_s": estimate.step_s * step_ratio,
            "reserved_bytes": estimate.reserved_bytes + residual_bytes,
        },
    }
    (folder / "monitor.json").write_text(json.dumps(record))
    return str(folder / "monitor.json")


def test_a_measured_run_corrects_the_next_plan(tmp_path: Path) -> None:
    calibration = Calibration.load(monitor_file(tmp_path, step_ratio=1.5, residual_bytes=GIB))
    before, after = choose(LLAMA_8B, TRAIN, cluster()), choose(LLAMA_8B, TRAIN, calibration.apply(cluster()))
    assert after.estimate.compute_s == pytest.approx(1.5 * before.estimate.compute_s)
    assert after.capacity_bytes == before.capacity_bytes - GIB
    assert "1.50 times the estimate" in calibration.describe()
    assert "+1,024 MiB" in calibration.describe()


def test_short_batches_do_not_make_the_machine_look_fast(tmp_path: Path) -> None:
    file = Path(monitor_file(tmp_path, step_ratio=1.0, residual_bytes=0))
    record = json.loads(file.read_text())
    estimate = record["estimate"]
    half_s = estimate["step_s"] - estimate["compute_s"] / 2
    record["measured"] |= {"step_s": 1.2 * half_s, "batch_fill": 0.5}
    file.write_text(json.dumps(record))
    assert Calibration.load(file).step_ratio == pytest.approx(1.2)


def test_what_is_named_is_not_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan for hardware that is given is the same on every machine; one for this host takes its measured speed."""
    monkeypatch.setattr("lightning_shard.hardware.host.product_flops", {"float32": 7e10, "bfloat16": 1e10}.__getitem__)
    arguments = [
        "plan",
        "--model",
        str(CONFIGS / "llama-3.1-8b"),
        "--precision",
        "32-true",
        "--seq-len",
        "64",
        "--json",
    ]
    seconds = []
    for where in (["--device", "cpu"], ["--device-memory", "64GiB"], []):
        main([*arguments, *where])
        seconds.append(json.loads(capsys.readouterr().out)["estimate"]["step_s"])
    monkeypatch.setattr("lightning_shard.hardware.host.product_flops", {"float32": 1e10, "bfloat16": 1e9}.__getitem__)
    for where, before in zip((["--device", "cpu"], ["--device-memory", "64GiB"], []), seconds, strict=True):
        main([*arguments, *where])
        after = json.loads(capsys.readouterr().out)["estimate"]["step_s"]
        assert (after == before) if where else (after > 2 * before)


@pytest.mark.parametrize("text", ["", "{}", '{"measured": {"step_s": null}, "estimate": null}'])
def test_a_file_without_a_measurement_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "monitor.json").write_text(text)
    with pytest.raises(ValueError, match=r"monitor.json (is no file of ShardMonitor|holds no measurement)"):
        Calibration.load(tmp_path / "monitor.json")


def test_measured_links_decide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timings = [Timing(kind="all_gather", ranks=8, size_bytes=2**16 * 256**i, seconds=1.0 + i) for i in range(2)]
    slow = fit_link("slow", "intra", timings, source="test")
    LinkProfile(intra=slow).save(tmp_path / "links.json")
    arguments = ["plan", "--model", str(CONFIGS / "llama-3.1-8b"), "--device", "l40s", "--devices", "8", "--json",
                 "--lora-r", "16", "--seq-len", "512", "--device-memory", "18GiB"]  # fmt: skip
    main(arguments)
    fast = json.loads(capsys.readouterr().out)
    main([*arguments, "--links", str(tmp_path / "links.json")])
    assert json.loads(capsys.readouterr().out)["estimate"]["step_s"] > 10 * fast["estimate"]["step_s"]


def test_a_simulated_plan_says_so_and_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "--model", str(CONFIGS / "smollm2-135m"), "--device", "rtx-4090", "--devices", "2",
                 "--seq-len", "256", "--json"]  # fmt: skip
    main(arguments)
    analytic = json.loads(capsys.readouterr().out)["estimate"]
    assert main([*arguments, "--simulate"]) == 0
    simulated = json.loads(capsys.readouterr().out)["estimate"]
    assert simulated["method"] == "simulated"
    assert simulated["allocated_bytes"] == pytest.approx(analytic["allocated_bytes"], rel=0.05)


def test_a_saved_spec_has_no_code_to_simulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LLAMA_8B.save(tmp_path / "spec.json")
    assert main(["plan", "--model", str(tmp_path / "spec.json"), "--device", "a100-80", "--simulate"]) == 2
    assert "runs the model's own code" in capsys.readouterr().err


def test_bars_are_as_long_as_their_bytes() -> None:
    decision = choose(LLAMA_8B, TRAIN, cluster(memory_gib=24))
    bar = stacked_bars(decision)[0].plain
    assert bar.count("█") == pytest.approx(38 * decision.estimate.device_bytes / _widest(decision), abs=6)
    assert bar.endswith("GiB")


def _widest(decision: object) -> int:
    sizes = [sum(row.terms.values()) for row in decision.rejected[:5]]  # type: ignore[attr-defined]
    return max(decision.limit_bytes, decision.estimate.device_bytes, *sizes)  # type: ignore[attr-defined]


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    save_plot(choose(LLAMA_8B, TRAIN, cluster()), str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_into_a_missing_folder_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="its folder does not exist"):
        save_plot(choose(LLAMA_8B, TRAIN, cluster()), str(tmp_path / "nowhere" / "plan.png"))
