"""Shard just enough: what is kept whole, what still travels, and that neither changes the numbers."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from helpers.llama import NUM_BLOCKS, TinyLlama, Training, make_llama, make_tokens
from torch.distributed.tensor import DTensor

from lightning_shard import FSDP2Strategy, Plan
from lightning_shard.testing import RunResult, assert_parity, run_ranks, run_trainer

STEPS = 4
ACCUMULATED = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
PLANS: dict[str, Plan] = {
    "replicated-adapters": Plan(dp_shard=2, adapters="replicated"),
    "one-block-resident": Plan(dp_shard=2, adapters="replicated", resident_blocks=1),
    "all-resident": Plan(dp_shard=2, adapters="replicated", resident_blocks=NUM_BLOCKS),
    "resident-with-sharded-adapters": Plan(dp_shard=2, resident_blocks=2),
    "all-resident-with-sharded-adapters": Plan(dp_shard=2, resident_blocks=99),
    "kept-and-deferred": Plan(dp_shard=2, reshard_after_forward=False, defer_gradient_sync=True),
    "offloaded": Plan(dp_shard=2, offload="all"),
    "replicated-adapters-updated-on-the-host": Plan(dp_shard=2, adapters="replicated", offload="optimizer"),
    "hsdp-with-replicated-adapters": Plan(dp_replicate=2, dp_shard=2, adapters="replicated", resident_blocks=1),
}


def run(num_ranks: int, strategy: Any, training: Training, **options: Any) -> list[RunResult]:
    make = partial(TinyLlama, training)
    return run_ranks(num_ranks, run_trainer, make, make_tokens, strategy=strategy, max_steps=STEPS, **options)


@cache
def one_process(training: Training) -> RunResult:
    (result,) = run(1, "auto", training, **ACCUMULATED)
    return result


@pytest.mark.parametrize("training", ["lora", "full"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if "on-the-host" in name else []) for name in PLANS]
)
def test_residency_keeps_the_numbers(name: str, training: Training) -> None:
    plan = PLANS[name]
    for result in run(plan.world_size, partial(FSDP2Strategy, plan), training, **ACCUMULATED):
        assert_parity(result, one_process(training))


def test_every_resident_block_saves_exactly_its_two_gathers() -> None:
    model = make_llama()
    block_bytes = sum(4 * p.numel() for p in model.model.layers[0].parameters())
    gathered = []
    for resident in range(NUM_BLOCKS):
        plan = Plan(dp_shard=2, adapters="replicated", resident_blocks=resident)
        result = run(2, partial(FSDP2Strategy, plan), "lora")[0]
        gathered.append(result.collectives[1].num_bytes["all_gather"])
        assert result.collectives[1]["all_reduce"] == 1
        assert result.collectives[1]["reduce_scatter"] == 0
    assert [a - b for a, b in zip(gathered, gathered[1:], strict=False)] == [2 * block_bytes] * (NUM_BLOCKS - 1)


def test_with_everything_resident_only_adapter_gradients_travel() -> None:
    plan = Plan(dp_shard=2, adapters="replicated", resident_blocks=NUM_BLOCKS)
    result = run(2, partial(FSDP2Strategy, plan), "lora")[0]
    sent = result.collectives[1]
    adapters_bytes = sum(4 * p.numel() for p in result.parameters.values())
    assert sent["all_gather"] == 0
    assert sent.num_bytes["all_reduce"] == adapters_bytes


def test_adapter_traffic_does_not_grow_with_accumulation() -> None:
    plan = Plan(dp_shard=2, adapters="replicated", reshard_after_forward=False)
    strategy = partial(FSDP2Strategy, plan)
    once = run(2, strategy, "lora")[0].collectives[1]
    result = run(2, strategy, "lora", accumulate_grad_batches=4)[0]
    window = [sum(c.num_bytes[kind] for c in result.collectives[4:8]) for kind in ("all_gather", "all_reduce")]
    assert window == [once.num_bytes["all_gather"], once.num_bytes["all_reduce"]]


class HeldBytes(TinyLlama):
    """Notes the bytes of this rank's frozen and trained parameters, and of their gradients."""

    def on_before_optimizer_step(self, _: Any) -> None:
        def held(tensors: list[torch.Tensor]) -> int:
            return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)

        self.frozen_bytes = held([p for p in self.parameters() if not p.requires_grad])
        self.trained_bytes = held([p for p in self.parameters() if p.requires_grad])
        self.gradient_bytes = held([p.grad for p in self.parameters() if p.grad is not None])


def held_bytes(plan: Plan) -> tuple[int, int, int]:
    module = HeldBytes("lora")
    run_trainer(lambda: module, make_tokens, strategy=lambda: FSDP2Strategy(plan), max_steps=1)
    return module.frozen_bytes, module.trained_bytes, module.gradient_bytes


def test_bytes_held_grow_with_every_resident_block() -> None:
    frozen = []
    for resident in range(NUM_BLOCKS + 1):
        plan = Plan(dp_shard=2, resident_blocks=resident)
        frozen.append(run_ranks(2, held_bytes, plan)[0][0])
    assert frozen == sorted(set(frozen))
    whole = sum(4 * p.numel() for p in make_llama().parameters())
    assert frozen[0] == whole // 2
    assert frozen[-1] == whole


def test_sharded_adapters_hold_gradients_for_their_share_only() -> None:
    _, trained, gradients = run_ranks(2, held_bytes, Plan(dp_shard=2))[0]
    total = sum(4 * p.numel() for p in TinyLlama("lora").parameters() if p.requires_grad)
    assert trained == gradients == total // 2


def test_an_unknown_resident_block_is_named() -> None:
    plan = Plan(dp_shard=2, resident_blocks=("model.model.layers.7",))
    with pytest.raises(Exception, match=r"keeps model\.model\.layers\.7 resident.*model\.model\.layers\.0"):
        run(2, partial(FSDP2Strategy, plan), "full")
