"""Bytes over each link: by hand for layouts whose rings are easily drawn."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from scale_table import CONFIGS, FULL, LORA, cluster, layout, row

from lightning_shard import ModelSpec, Plan, TrainSpec, plan
from lightning_shard.memory.situation import make_situation
from lightning_shard.planner.considered import inject
from lightning_shard.timing import time_step
from lightning_shard.traffic import LinkBytes, link_bytes

MODEL = ModelSpec.from_pretrained(CONFIGS / "llama-3.1-8b")
TRAIN = TrainSpec(seq_len=2048)
WEIGHTS = MODEL.num_parameters
FP32, REDUCED = 4, 4
"""Bytes of a gradient in an all-reduce of replicas, and in a reduction of shards under bf16-true."""


def sent(devices: int, **fields: int) -> LinkBytes:
    return link_bytes(make_situation(MODEL, TRAIN, Plan(**fields), cluster(devices)))  # type: ignore[arg-type]


def test_replicas_leave_the_node_once_around_and_once_back() -> None:
    found = sent(16, dp_replicate=16)
    once = 2 * 15 / 16 * FP32 * WEIGHTS
    assert found.intra_bytes == pytest.approx(once, rel=0.01)
    assert found.inter_bytes == pytest.approx(once, rel=0.01)  # one ring through all devices of the node


def test_replicas_of_one_node_never_leave_it() -> None:
    assert sent(8, dp_replicate=8).inter_bytes == 0
    assert sent(8, dp_shard=8).inter_bytes == 0


def test_shards_inside_nodes_send_out_only_the_gradients_of_their_part() -> None:
    everywhere, inside = sent(32, dp_shard=32), sent(32, dp_replicate=4, dp_shard=8)
    assert inside.inter_bytes == pytest.approx(2 * 3 / 4 * REDUCED * WEIGHTS, rel=0.02)  # 8 rings of an eighth each
    assert everywhere.inter_bytes > inside.inter_bytes
    assert everywhere.inter_bytes == pytest.approx(everywhere.intra_bytes)


def test_accumulating_gathers_again_but_replicas_meet_once() -> None:
    once, twice = (
        link_bytes(make_situation(MODEL, TrainSpec(seq_len=2048, accumulate=n), Plan(dp_replicate=2, dp_shard=8), cluster(16)))
        for n in (1, 2)
    )  # fmt: skip
    assert twice.intra_bytes == pytest.approx(2 * once.intra_bytes)
    assert twice.inter_bytes == pytest.approx(once.inter_bytes)


@pytest.mark.parametrize("fields", [{"dp_replicate": 8}, {"dp_shard": 8}])
def test_inside_one_node_it_is_what_the_model_of_time_counts(fields: dict[str, int]) -> None:
    situation = make_situation(MODEL, TRAIN, Plan(**fields), cluster(8))  # type: ignore[arg-type]
    assert link_bytes(situation).intra_bytes == pytest.approx(time_step(situation).comm_bytes, rel=0.01)


def test_latency_grows_with_the_ranks_of_a_ring() -> None:
    """Past some size shards over all ranks wait for hops; replicas of smaller rings do not."""
    lora = inject(MODEL, LORA)

    def step_s(**fields: int) -> float:
        return time_step(make_situation(lora, LORA, Plan(**fields), cluster(4096))).step_s  # type: ignore[arg-type]

    assert step_s(dp_shard=4096) > 1.5 * step_s(dp_replicate=512, dp_shard=8)
    assert plan(MODEL, LORA, cluster(4096)).plan.dp_replicate > 1


def test_a_row_of_the_documented_table() -> None:
    found = row(MODEL, FULL, cluster(64))
    assert found.startswith("| 64 | shard 64")
    assert layout(plan(MODEL, FULL, cluster(64))) in found
    assert "does not fit: lacks" in row(ModelSpec.from_pretrained(CONFIGS / "llama-3.1-405b"), FULL, cluster(8))
