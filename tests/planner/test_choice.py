"""Which layout is chosen, with the published cases that other selectors get wrong."""

import dataclasses
import json
from typing import Any

import pytest
import torch
from hand_specs import GIB, LLAMA_1B, LLAMA_2_7B, LLAMA_2_70B, LLAMA_8B, LLAMA_70B, TINY, cluster

from lightning_shard.hardware import find_link
from lightning_shard.planner import Decision, choose, estimate, simplicity
from lightning_shard.plans import Plan
from lightning_shard.specs import AdapterSpec, ModelSpec, TrainSpec

LORA_SHORT = TrainSpec(seq_len=512, adapter=AdapterSpec(r=16))
LORA = TrainSpec(seq_len=2048, adapter=AdapterSpec(r=16))


def test_a_70b_never_gets_ddp_on_80_gib() -> None:
    """L17: 140 GB of bf16 weights on each device."""
    for train in (LORA, TrainSpec(seq_len=2048), TrainSpec(seq_len=1, adapter=AdapterSpec(r=1))):
        decision = choose(LLAMA_70B, train, cluster(memory_gib=80), headroom=0.0)
        assert decision.plan.strategy == "fsdp2"
        ddp = [row for row in decision.rejected if row.plan.strategy == "ddp"]
        assert all(row.device_bytes > 140e9 for row in ddp)
        assert all("GiB usable" in row.reason for row in ddp)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_llama_2_70b_lora_does_not_fit_on_two_80_gib_devices(devices: int, micro_batch_size: int) -> None:
    """L3: out of memory at every batch size, with checkpointing, as published."""
    train = TrainSpec(seq_len=4096, micro_batch_size=micro_batch_size, adapter=AdapterSpec(r=16))
    pin = {"activation_checkpoint": "full"}
    decision = choose(LLAMA_2_70B, train, cluster("a100-80", devices), headroom=0.0, pin=pin)
    assert not decision.fits
    assert decision.shortfall_bytes > 0
    assert decision.estimate.device_bytes > 140e9 / devices


def test_90b_in_full_cannot_fit_eight_80_gib_devices() -> None:
    """L15: 16 bytes per parameter, 180 GB per device on 8, against 22.5 GB of a frozen bf16 base."""
    full = choose(LLAMA_70B, TrainSpec(seq_len=1024), cluster(memory_gib=80))
    states = sum(full.estimate.terms[key] for key in ("trained_weights", "optimizer_state")) / LLAMA_70B.num_parameters
    assert not full.fits
    assert states == pytest.approx(12 / 8, rel=1e-3)
    pin = {"activation_checkpoint": "full", "resident_blocks": 0}
    lora = choose(LLAMA_70B, LORA, cluster(memory_gib=80), pin=pin)
    assert lora.fits
    assert lora.estimate.terms["frozen_weights"] == pytest.approx(2 * LLAMA_70B.num_parameters / 8, rel=1e-3)


def test_shards_inside_nodes_relieve_a_slow_network_of_full_training_but_not_of_adapters() -> None:
    """Measured on two nodes of two at 100 Mbit: HSDP 3.1 s a step, replicas 4.3 s, all sharded 8.7 s."""
    slow = dataclasses.replace(find_link("eth10"), bytes_per_s=12.5e6, peak_bytes_per_s=12.5e6)
    nodes = dataclasses.replace(cluster("cpu", devices=2, nodes=2, memory_gib=64), inter_link=slow)
    full = choose(LLAMA_1B, TrainSpec(seq_len=512), nodes)
    assert (full.plan.dp_replicate, full.plan.dp_shard) == (2, 2)
    assert any(row.plan.strategy == "ddp" and "fits, but takes" in row.reason for row in full.rejected)
    assert choose(LLAMA_1B, LORA_SHORT, nodes).plan.strategy == "ddp"
    kept = {"dp_replicate": 1, "dp_shard": 4, "reshard_after_forward": False}
    shards = choose(LLAMA_1B, TrainSpec(seq_len=512), nodes, pin=kept).estimate
    assert shards.step_s > full.estimate.step_s * 1.25  # gloo scatters sums by an all-reduce


def test_ddp_when_it_fits_with_headroom_else_fsdp2_else_no() -> None:
    found = {}
    for memory_gib in (6, 16, 48):
        decision = choose(LLAMA_8B, TrainSpec(seq_len=512, adapter=AdapterSpec()), cluster(memory_gib=memory_gib))
        found[memory_gib] = (decision.plan.strategy, decision.fits)
        assert decision.fits == (decision.estimate.device_bytes <= 0.9 * memory_gib * GIB)
    assert found == {6: ("fsdp2", False), 16: ("fsdp2", True), 48: ("ddp", True)}


def test_one_device_needs_no_collective() -> None:
    decision = choose(LLAMA_1B, LORA, cluster(devices=1))
    assert decision.plan == Plan()
    assert decision.estimate.comm_bytes == 0
    assert "ddp_buckets" not in decision.estimate.terms
    assert "collective_buffers" not in decision.estimate.terms


def test_headroom_and_95_percent() -> None:
    needs = choose(LLAMA_8B, LORA, cluster()).estimate.device_bytes
    just = cluster(memory_gib=needs / 0.96 / GIB)
    assert choose(LLAMA_8B, LORA, just, headroom=0.0).plan.strategy == "fsdp2"
    enough = cluster(memory_gib=needs / 0.94 / GIB)
    assert choose(LLAMA_8B, LORA, enough, headroom=0.0).plan.strategy == "ddp"
    assert choose(LLAMA_8B, LORA, enough, headroom=0.1).plan.strategy == "fsdp2"


def test_a_70b_on_1024_devices_weighs_some_hundred_plans() -> None:
    """At a millisecond or two for each the answer comes within a second."""
    decision = choose(LLAMA_70B, TrainSpec(seq_len=8192), cluster(nodes=128))
    assert 38 <= len(decision.rejected) + 1 < 300  # every layout at least once
    assert decision.plan.world_size == 1024
    assert decision.plan.strategy == "fsdp2"


def test_what_would_help_is_tried_out() -> None:
    train = TrainSpec(seq_len=4096, micro_batch_size=4)
    decision = choose(LLAMA_8B, train, cluster(devices=2))
    assert not decision.fits
    assert any("LoRA" in line for line in decision.advice)
    assert any("such devices" in line for line in decision.advice)


def test_the_gap_to_ddp_is_named() -> None:
    decision = choose(LLAMA_8B, TrainSpec(seq_len=2048), cluster())
    assert decision.plan.strategy == "fsdp2"
    assert any("more per device DDP would fit" in line for line in decision.advice)


def test_every_layout_is_weighed_and_accounted_for() -> None:
    decision = choose(LLAMA_8B, LORA, cluster())
    found = [decision.plan, *(row.plan for row in decision.rejected)]
    assert len(found) == len(set(found))
    assert {(plan.dp_replicate, plan.dp_shard) for plan in found if plan.tp == 1} == {(8, 1), (4, 2), (2, 4), (1, 8)}
    assert all(plan.world_size == 8 for plan in found)
    assert min(found, key=simplicity).strategy == "ddp"


def on_pcie(memory_gib: float) -> Any:
    return cluster("l40s", memory_gib=memory_gib)


def test_just_enough_is_sharded() -> None:
    """Where a whole copy does not fit, as many blocks stay whole as fit, and the step gets faster with each."""
    seen = []
    for memory_gib in (16, 18, 20):
        pin = {"dp_shard": 8, "activation_checkpoint": "none"}
        decision = choose(LLAMA_8B, LORA_SHORT, on_pcie(memory_gib), pin=pin)
        assert decision.fits
        assert decision.plan.strategy == "fsdp2"
        assert decision.plan.adapters == "replicated"
        seen.append((decision.plan.resident_blocks, decision.estimate.step_s))
        one_more = dataclasses.replace(decision.plan, resident_blocks=decision.plan.resident_blocks + 1)
        more = estimate(LLAMA_8B.with_adapter(LORA_SHORT.adapter), LORA_SHORT, one_more, on_pcie(memory_gib))
        assert more.device_bytes > decision.limit_bytes
    assert [resident for resident, _ in seen] == sorted({resident for resident, _ in seen})
    assert [step for _, step in seen] == sorted((step for _, step in seen), reverse=True)


def test_just_enough_blocks_recompute() -> None:
    train = TrainSpec(seq_len=4096, micro_batch_size=4, adapter=AdapterSpec(r=16))
    decision = choose(LLAMA_8B, train, cluster())
    assert decision.fits
    assert decision.plan.activation_checkpoint == "full"
    count = decision.plan.activation_checkpoint_blocks
    assert count is not None
    fewer = dataclasses.replace(decision.plan, activation_checkpoint_blocks=count - 1)
    needs = estimate(LLAMA_8B.with_adapter(train.adapter), train, fewer, cluster()).device_bytes
    assert needs > decision.limit_bytes


def test_replicas_lie_across_a_slow_network() -> None:
    """Full sharding over 10 Gbit Ethernet would gather every block across it."""
    where = dataclasses.replace(cluster(nodes=2), inter_link=find_link("eth10"))
    decision = choose(LLAMA_8B, TrainSpec(seq_len=2048), where)
    assert decision.plan.dp_replicate == 2
    assert decision.plan.dp_shard == 8


def test_offload_is_advice_and_never_a_silent_choice() -> None:
    train, where = TrainSpec(seq_len=512), cluster(memory_gib=13)
    decision = choose(LLAMA_8B, train, where)
    assert not decision.fits
    assert any("(pin={'offload': 'all'})" in line for line in decision.advice)
    typed = choose(LLAMA_8B, train, where, surroundings="command line")
    assert any("(--pin offload=all)" in line for line in typed.advice)
    pinned = choose(LLAMA_8B, train, where, pin={"offload": "all"})
    assert pinned.fits
    assert "host memory" in pinned.reason
    assert pinned.estimate.step_s > 2 * decision.estimate.step_s


def test_the_optimizers_state_goes_to_the_host_before_the_shards_do() -> None:
    train, where = TrainSpec(seq_len=512), cluster(memory_gib=20)
    decision = choose(LLAMA_8B, train, where)
    assert not decision.fits
    assert any("(pin={'offload': 'optimizer'})" in line for line in decision.advice)
    assert not any("'all'" in line for line in decision.advice)
    pinned = choose(LLAMA_8B, train, where, pin={"offload": "optimizer"})
    assert pinned.fits
    assert "optimizer's state in host memory" in pinned.reason
    assert "optimizer_state" not in pinned.estimate.terms


def test_ddp_buckets_are_sized_from_what_trains() -> None:
    assert choose(LLAMA_8B, LORA, cluster()).plan.bucket_cap_mb == 25.0
    small = choose(TINY, TrainSpec(seq_len=64, adapter=AdapterSpec(r=2)), cluster(devices=2)).plan
    assert small.bucket_cap_mb is not None
    assert small.bucket_cap_mb < 1.0


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ({"color": 1}, "'color' is not a field of a Plan"),
        ({"tp": 3}, "tp=3 cannot be carried out: its ranks must lie inside a node, .* 8 devices of one"),
        ({"tp": 16}, "tp=16 cannot be carried out: its ranks must lie inside a node"),
        ({"tp": 0}, "tp=0 cannot be carried out: it must be a whole number, 1 or more"),
        ({"tp": 2, "adapters": "replicated"}, "adapters='replicated' does not go with tensor parallelism"),
        ({"tp": 2, "resident_blocks": 4}, "resident_blocks=4 does not go with tensor parallelism"),
        ({"offload": "all", "dp_shard": 1, "tp": 1}, "offload=all needs shards"),
        ({"offload": "disk"}, "offload='disk' cannot be weighed yet"),
        ({"dp_shard": 3}, "No layout of 8 devices honours"),
        ({"dp_replicate": 2, "dp_shard": 8}, "No layout of 8 devices honours"),
    ],
)
def test_pins_that_cannot_be_carried_out(pin: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose(LLAMA_8B, LORA, cluster(), pin=pin)


def test_pins_are_honoured() -> None:
    decision = choose(LLAMA_8B, LORA, cluster(), pin={"dp_shard": 8, "activation_checkpoint": "full", "compile": True})
    assert decision.plan.dp_shard == 8
    assert decision.plan.activation_checkpoint == "full"
    assert decision.plan.compile
    assert all(row.plan.dp_shard == 8 for row in decision.rejected)


@pytest.mark.parametrize("headroom", [-0.1, 1.0])
def test_headroom_out_of_range(headroom: float) -> None:
    with pytest.raises(ValueError, match="headroom"):
        choose(LLAMA_8B, LORA, cluster(), headroom=headroom)


def test_a_sequence_beyond_the_positions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seq_len=5000 is beyond the 4096 positions of llama-2-7b"):
        choose(LLAMA_2_7B, TrainSpec(seq_len=5000), cluster())


def test_nothing_to_train_is_refused() -> None:
    values = TINY.to_dict()
    for unit in values["units"]:
        unit["tensors"] = [{**tensor, "trainable": False} for tensor in unit["tensors"]]
    frozen = ModelSpec.from_dict(values)
    with pytest.raises(ValueError, match="every parameter is frozen"):
        choose(frozen, TrainSpec(), cluster())


def test_decisions_survive_json() -> None:
    for train in (LORA, TrainSpec(seq_len=8192, micro_batch_size=8)):
        decision = choose(LLAMA_8B, train, cluster())
        assert Decision.from_dict(json.loads(json.dumps(decision.to_dict()))) == decision


def test_adapters_of_bare_experts_exclude_resident_blocks() -> None:
    """The engine refuses both together under a precision that casts, so the planner neither chooses nor takes a pin."""
    import transformers

    config = transformers.MixtralConfig(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=4096, num_local_experts=4,
    )  # fmt: skip
    with torch.device("meta"):
        model = ModelSpec.from_module(transformers.MixtralForCausalLM(config))
    where, sharded = cluster("h100-sxm", devices=8), {"dp_shard": 8}
    mixed = TrainSpec(seq_len=1024, adapter=AdapterSpec(r=8), precision="bf16-mixed")
    assert choose(model, mixed, where, pin=sharded).plan.resident_blocks == 0
    with pytest.raises(
        ValueError, match="resident_blocks=2 cannot be carried out: the adapters of bare expert weights"
    ):
        choose(model, mixed, where, pin={**sharded, "resident_blocks": 2})
    narrow = dataclasses.replace(mixed, precision="bf16-true")
    assert choose(model, narrow, where, pin={**sharded, "resident_blocks": 2}).plan.resident_blocks == 2
