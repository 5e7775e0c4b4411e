"""Runs of four and six blocks tell what twelve need, to the byte."""

import dataclasses

import pytest
from helpers.checkered import checkered
from helpers.llama import make_llama

from lightning_shard.plans import Plan
from lightning_shard.simulate import Simulation, simulate
from lightning_shard.simulate.allocator import LARGE_SEGMENT_BYTES
from lightning_shard.simulate.depth import Counted, NotLinearError, extrapolate
from lightning_shard.simulate.result import MomentPeak
from lightning_shard.simulate.truncate import can_truncate
from lightning_shard.specs import AdapterSpec, TrainSpec

KIB = 1024
PLANS = {
    "one": Plan(),
    "ddp": Plan(dp_replicate=4),
    "fsdp2": Plan(dp_shard=4),
    "kept": Plan(dp_shard=4, reshard_after_forward=False),
    "recompute": Plan(dp_shard=4, activation_checkpoint="full"),
    "ddp-recompute": Plan(dp_replicate=4, activation_checkpoint="full"),
}


def twelve(plan: Plan, train: TrainSpec, depth: str) -> Simulation:
    return simulate(lambda: make_llama(num_hidden_layers=12), train, plan, depth=depth)  # type: ignore[arg-type]


@pytest.mark.parametrize(*checkered(one_in=3, name=PLANS, training=["full", "lora"]))
def test_extrapolated_is_the_full_run(name: str, training: str) -> None:
    adapter = AdapterSpec(r=4) if training == "lora" else None
    train, plan = TrainSpec(micro_batch_size=4, seq_len=64, adapter=adapter), PLANS[name]
    full, guess = (twelve(plan, train, depth) for depth in ("full", "extrapolated"))
    assert guess.depths == (4, 5, 6)
    # Buckets are rounded up to 512 bytes, gathered and reduced tensors are not.
    rounding_bytes = 4096 if plan.strategy == "ddp" and plan.world_size > 1 else 0
    assert guess.allocated_bytes == pytest.approx(full.allocated_bytes, abs=rounding_bytes)
    assert guess.kinds == pytest.approx(full.kinds, abs=rounding_bytes)
    assert guess.collectives == full.collectives
    assert guess.reserved_bytes == pytest.approx(full.reserved_bytes, abs=LARGE_SEGMENT_BYTES)
    by_name = {moment.name: moment.kinds for moment in full.moments}
    assert all(by_name[moment.name] == pytest.approx(moment.kinds, abs=rounding_bytes) for moment in guess.moments)


def test_blocks_that_differ_are_all_run() -> None:
    plan = Plan(dp_shard=4, activation_checkpoint="full", activation_checkpoint_blocks=3)
    result = twelve(plan, TrainSpec(seq_len=16), "extrapolated")
    assert result.depths == ()
    assert result.num_blocks == 12


def test_only_equal_blocks_can_be_left_out() -> None:
    model = make_llama(num_hidden_layers=4)
    assert can_truncate(model, Plan())
    assert not can_truncate(model, Plan(dp_shard=2, resident_blocks=2))
    model.model.layers[2].mlp.gate_proj.weight.requires_grad_(False)
    assert not can_truncate(model, Plan())


def test_what_is_not_on_a_line_is_not_extrapolated() -> None:
    def run(blocks: int, size: int) -> Counted:
        peak = MomentPeak(name="end of forward", allocated_bytes=size, kinds={"activations": size})
        return Counted(num_blocks=blocks, moments=(peak,), collectives=(), reserved_bytes=size, guessed_branches=0)

    assert extrapolate([run(4, 400), run(5, 500), run(6, 600)], 32).moments[0].allocated_bytes == 3200
    with pytest.raises(NotLinearError):
        extrapolate([run(4, 400 * KIB), run(5, 500 * KIB), run(6, 620 * KIB)], 32)
    other = dataclasses.replace(run(5, 500), moments=())
    with pytest.raises(NotLinearError, match="different moments"):
        extrapolate([run(4, 400), other, run(6, 600)], 32)
