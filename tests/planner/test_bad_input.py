"""What cannot be planned: one clear sentence, exit code 2 on the command line, the same error in Python."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hand_specs import LLAMA_8B, cluster

from lightning_shard.cli import main
from lightning_shard.planner import Calibration, choose
from lightning_shard.specs import AdapterSpec, ModelSpec, TrainSpec
from lightning_shard.specs.from_pretrained import read_pretrained

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
TRAIN = TrainSpec(seq_len=64)


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 0}, "sizes that are not positive whole numbers: {'num_attention_heads': 0}"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, "not a multiple of the number of attention heads"),
        ({"num_key_value_heads": 3}, "4 attention heads over 3 key-value heads, which must divide them"),
        ({"vocab_size": -5}, "{'vocab_size': -5}"),
        ({"vocab_size": "x"}, "{'vocab_size': 'x'}"),
        ({"intermediate_size": 0}, "{'intermediate_size': 0}"),
        ({"head_dim": -2}, "{'head_dim': -2}"),
        ({"num_hidden_layers": 2.5}, "{'num_hidden_layers': 2.5}"),
        ({"model_type": "nosuch"}, "model type `nosuch`"),
        ({"rms_norm_eps": "wide"}, "cannot be read"),
    ],
)  # fmt: skip
def test_configs(change: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    assert message in refused(["--model", str(tmp_path), "--device", "a100-80", "--seq-len", "64"], capsys)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\x00", b"[1]", b'{"model_type": "lla', b"{}"])
def test_unreadable_configs(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert str(tmp_path / "config.json") in refused(["--model", str(tmp_path), "--device", "a100-80"], capsys)


def _change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(values: Any) -> None:
        *parents, last = path.split(".")
        for name in parents:
            values = values[int(name) if name.isdigit() else name]
        values[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_change("units", 5), "not complete"),
        (_change("units.0.names", []), "a unit without a name"),
        (_change("units.0.kind", "wing"), "kind of a unit='wing' must be one of"),
        (_change("architecture.heads", 0), "heads=0 must be a whole number, 1 or more"),
        (_change("architecture.hidden", "wide"), "hidden='wide' must be a whole number"),
        (_change("architecture.experts", -4), "experts=-4 must be a whole number, 0 or more"),
        (_change("buffers_bytes", -1), "buffers_bytes=-1 must be a whole number, 0 or more"),
        (_change("tp_plan", [["a"]]), "['a'] is no pair of names"),
    ],
)
def test_saved_specs(
    change: Callable[[dict[str, Any]], None], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = json.loads(json.dumps(LLAMA_8B.to_dict()))
    change(values)
    (tmp_path / "spec.json").write_text(json.dumps(values))
    assert message in refused(["--model", str(tmp_path / "spec.json"), "--device", "a100-80"], capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "many"], "argument --devices: invalid int value: 'many'"),
        (["--attention", "flash"], "argument --attention: invalid choice: 'flash'"),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["--headroom", "nan"], "headroom=nan must be at least 0 and below 1"),
        (["--lora-r", "8", "--lora-alpha", "-1"], "alpha=-1.0 must be a number above 0"),
        (["--lora-r", "8", "--lora-alpha", "nan"], "alpha=nan must be a number above 0"),
        (["--pin", "compile={}"], "compile={} must be one of True, False"),
        (["--pin", "resident_blocks=[1,2]"], "resident_blocks=(1, 2) must be a number of blocks, or their names"),
        (["--devices", "8", "--pin", 'resident_blocks=["nope"]'], "resident_blocks names 'nope'"),
        (["--devices", "8", "--pin", "reshard_after_forward=3"], "a number for reshard_after_forward must divide"),
        (["--pin", "bucket_cap_mb=big"], "bucket_cap_mb='big' must be above 0 MiB"),
        (["--pin", "tp=null"], "tp=None cannot be carried out: it must be a whole number"),
        (["--pin", "dp_shard=2.5"], "dp_shard=2.5 must be a whole number"),
    ],
)
def test_options(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LLAMA_8B.save(tmp_path / "spec.json")
    assert message in refused(["--model", str(tmp_path / "spec.json"), "--device", "a100-80", *arguments], capsys)


def test_a_number_for_reshard_leaves_the_layouts_it_divides() -> None:
    decision = choose(LLAMA_8B, TRAIN, cluster(), pin={"reshard_after_forward": 4, "tp": 1})
    plans = [decision.plan, *(row.plan for row in decision.rejected)]
    assert {plan.dp_shard for plan in plans} == {4, 8}
    assert all(plan.reshard_after_forward == 4 for plan in plans)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "llama"}, "model='llama' must be a ModelSpec"),
        ({"train": {"seq_len": 4}}, "must be a TrainSpec"),
        ({"cluster": 8}, "cluster=8 must be a Cluster"),
        ({"headroom": "0.1"}, "headroom='0.1' must be a number"),
        ({"headroom": True}, "headroom=True must be a number"),
        ({"pin": ["tp"]}, r"pin=\['tp'\] must map fields of a Plan to values"),
    ],
)
def test_wrong_types_in_python(arguments: dict[str, Any], message: str) -> None:
    values = {"model": LLAMA_8B, "train": TRAIN, "cluster": cluster(), **arguments}
    options = {name: values.pop(name) for name in ("headroom", "pin") if name in values}
    with pytest.raises(TypeError, match=message):
        choose(values["model"], values["train"], values["cluster"], **options)


@pytest.mark.parametrize("memory", ["80GiB", 0, -1, 2.5, True])
def test_memory_of_a_device_is_a_positive_number_of_bytes(memory: Any) -> None:
    with pytest.raises(ValueError, match="device_memory_bytes=.* must be a whole number, 1 or more"):
        dataclasses.replace(cluster(), device_memory_bytes=memory)


def _monitor(tmp_path: Path, measured: dict[str, Any]) -> Path:
    terms = {"trained_weights": 4 * 10**9, "optimizer_state": 8 * 10**9, "activations": 10**9}
    record = {"measured": measured, "estimate": {"terms": terms, "step_s": 1.0, "reserved_bytes": 14 * 10**9}}
    (tmp_path / "monitor.json").write_text(json.dumps(record))
    return tmp_path / "monitor.json"


def test_a_measurement_below_its_own_weights_and_state_is_impossible(tmp_path: Path) -> None:
    file = _monitor(tmp_path, {"step_s": 1.0, "reserved_bytes": 11 * 10**9})
    with pytest.raises(ValueError, match=r"is impossible: 10.24 GiB measured, .* alone take 11.18 GiB"):
        Calibration.load(file)
    assert Calibration.load(_monitor(tmp_path, {"reserved_bytes": 13 * 10**9})).residual_bytes == -(10**9)


@pytest.mark.parametrize("measured", [{"step_s": "fast"}, {"step_s": -1.0}, {"reserved_bytes": [1]}, [1]])
def test_a_measurement_is_a_number(measured: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no file of ShardMonitor"):
        Calibration.load(_monitor(tmp_path, measured))


def test_advice_is_worded_for_where_it_is_read() -> None:
    where = cluster(devices=1, memory_gib=24)
    python = choose(LLAMA_8B, TRAIN, where).advice
    typed = choose(LLAMA_8B, TRAIN, where, surroundings="command line").advice
    assert any("lightning_shard.lora(model, r=16)" in line for line in python)
    assert any("(--lora-r 16)" in line for line in typed)
    assert not any("--" in line for line in python)


def test_a_spec_is_not_an_adapter() -> None:
    with pytest.raises(ValueError, match=r"alpha='32' must be a number above 0"):
        AdapterSpec(alpha="32")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="This is not a saved model spec"):
        ModelSpec.from_dict({"model_type": "llama"})


def test_a_name_that_is_neither_here_nor_on_the_hub_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="'nobody/nothing' is no folder here .* not in the hub's cache"):
        read_pretrained("nobody/nothing")
