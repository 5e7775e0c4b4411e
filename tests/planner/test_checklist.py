"""The checklist of a plan, and the peak of resuming."""

import json
from pathlib import Path

import pytest
from hand_specs import GIB, LLAMA_8B, LLAMA_70B, cluster

from lightning_shard.cli import main
from lightning_shard.memory import floor_bytes
from lightning_shard.memory.situation import make_situation
from lightning_shard.planner import choose, estimate
from lightning_shard.plans import Plan
from lightning_shard.specs import AdapterSpec, TrainSpec

TOPICS = ["bucket size", "bucket views", "wrap granularity", "mixed precision", "network traffic", "tensor parallel"]
LORA = TrainSpec(seq_len=2048, adapter=AdapterSpec(r=16))


def answers(model: object, train: TrainSpec, nodes: int = 1, **pin: object) -> dict[str, str]:
    decision = choose(model, train, cluster(nodes=nodes), pin=pin)  # type: ignore[arg-type]
    assert [answer.topic for answer in decision.checklist] == TOPICS
    return {answer.topic: answer.answer for answer in decision.checklist}


def test_replicas() -> None:
    found = answers(LLAMA_8B, LORA, dp_shard=1, tp=1)
    # 41.9 million trained parameters in FP32 are 160 MiB.
    assert (
        found["bucket size"]
        == "25.00 MiB of 0.16 GiB of gradients, 7 all-reduces a step: all but the last beside backward"
    )
    assert found["bucket views"].startswith("yes")
    assert "every rank holds the whole model" in found["wrap granularity"]
    assert "float32, products run in bfloat16" in found["mixed precision"]
    assert "0.27 GiB per device over nvlink4" in found["network traffic"]  # 2 x 7/8 of the gradients
    assert found["tensor parallel"].startswith("not needed: a whole block takes 0.41 GiB")


def test_shards_over_two_nodes() -> None:
    found = answers(LLAMA_8B, TrainSpec(seq_len=2048), nodes=2, dp_shard=16, tp=1, resident_blocks=0)
    assert found["bucket size"].startswith("does not apply")
    assert found["wrap granularity"].startswith(
        "32 blocks of up to 0.41 GiB, one gathered ahead, embedding and head alone"
    )
    assert "the sharding policy casts" in found["mixed precision"]
    assert "per device over nvlink4" in found["network traffic"]
    assert "per node over ib400" in found["network traffic"]


def test_split_layers_and_one_device() -> None:
    split = answers(LLAMA_70B, LORA, tp=8)
    assert split["tensor parallel"].startswith(
        "yes, over 8 ranks of a node: each holds 0.20 GiB of a block and 1/8 of the vocabulary, "
    )
    one = choose(LLAMA_8B, LORA, cluster(devices=1))
    assert {answer.topic: answer.answer for answer in one.checklist}["network traffic"] == "none: one device"


def test_the_command_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    LLAMA_8B.save(tmp_path / "spec.json")
    arguments = ["plan", "--model", str(tmp_path / "spec.json"), "--device", "h100-sxm", "--devices", "8"]
    assert main([*arguments, "--lora-r", "16", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checklist"]
    assert [row["topic"] for row in rows] == TOPICS
    assert main([*arguments, "--lora-r", "16"]) == 0
    shown = capsys.readouterr().out
    assert "Checklist" in shown
    assert all(topic in shown for topic in TOPICS)
    assert "resume peak" in shown


def test_resuming_holds_weights_and_state_and_one_whole_tensor_beside_shards() -> None:
    train = TrainSpec(seq_len=512)
    whole, shards = (estimate(LLAMA_8B, train, plan, cluster()) for plan in (Plan(dp_replicate=8), Plan(dp_shard=8)))
    state = 12 * LLAMA_8B.num_parameters
    buffers = whole.terms["buffers"] - 24 * 512
    assert whole.resume_peak_bytes == state + buffers
    assert shards.resume_peak_bytes == state // 8 + buffers + 4 * 128256 * 4096
    away = estimate(LLAMA_8B, train, Plan(dp_shard=8, offload="all"), cluster())
    assert away.resume_peak_bytes == buffers + 4 * 128256 * 4096
    state_away = estimate(LLAMA_8B, train, Plan(dp_shard=8, offload="optimizer"), cluster())
    assert state_away.resume_peak_bytes == 4 * LLAMA_8B.num_parameters // 8 + buffers + 4 * 128256 * 4096


def test_the_floor_is_weights_and_optimizer_state() -> None:
    train = TrainSpec(seq_len=512, master_dtype="bfloat16")
    situation = make_situation(LLAMA_8B, train, Plan(), cluster())
    assert floor_bytes(situation) == 6 * LLAMA_8B.num_parameters
    assert floor_bytes(situation) / GIB == pytest.approx(44.87, abs=0.01)
