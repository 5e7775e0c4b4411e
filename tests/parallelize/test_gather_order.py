"""Blocks that only some ranks run: all ranks are told, none hangs; what all leave out alike is fine."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from helpers.llama import TinyLlama, make_tokens
from helpers.regression import Regression, make_vectors
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_shard import FSDP2Strategy, Plan
from lightning_shard.testing import assert_parity, run_ranks, run_trainer
from lightning_shard.testing.parity import QUIET

PLANS: dict[str, Plan] = {
    "resharded": Plan(dp_shard=2),
    "kept": Plan(dp_shard=2, reshard_after_forward=False),
    "prefetched": Plan(dp_shard=2, prefetch=2),
    "three-ranks": Plan(dp_shard=3),
    "hsdp": Plan(dp_shard=2, dp_replicate=2),
}


class LeavesOut(Regression):
    """Leaves out one block on one rank, or on all, from some batch on."""

    def __init__(self, block: int, *, rank: int | None, batch: int) -> None:
        super().__init__()
        self.left_out, self.rank, self.batch = block, rank, batch

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        x, targets = batch
        for index, block in enumerate(self.net[0]):
            if not self.leaves_out(index):
                x = block(x)
        return (self.net[1](x) - targets).pow(2).mean()

    def leaves_out(self, index: int) -> bool:
        here = self.rank is None or self.rank == dist.get_rank()
        return here and index == self.left_out and self.global_step >= self.batch


def told(plan: Plan, block: int, rank: int, batch: int) -> str:
    world_size = dist.get_world_size()

    def make_data(rank: int, _: int) -> Any:
        return make_vectors(rank % 2, 2 if world_size == 3 else world_size)

    make = partial(LeavesOut, block, rank=rank, batch=batch)
    try:
        run_trainer(make, make_data, strategy=lambda: FSDP2Strategy(plan), max_steps=4)
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    "plan", ["resharded", *(pytest.param(name, marks=pytest.mark.slow) for name in PLANS if name != "resharded")]
)
@pytest.mark.parametrize("block", [1, 2], ids=["middle", "last"])
@pytest.mark.parametrize("batch", [0, 2], ids=["at-once", "later"])
def test_all_ranks_are_told_of_a_block_that_one_leaves_out(plan: str, block: int, batch: int) -> None:
    messages = run_ranks(PLANS[plan].world_size, told, PLANS[plan], block, 1, batch, timeout_s=60)
    assert len(set(messages)) == 1
    assert "The ranks ran different blocks" in messages[0]
    assert f"rank 0 ran net.0.{block} and rank 1 " in messages[0]


@pytest.mark.parametrize("batch", [0, 2], ids=["at-once", "later"])
@pytest.mark.parametrize("plan", ["resharded", "kept", "prefetched"])
def test_a_block_that_all_ranks_leave_out_alike_is_fine(plan: str, batch: int) -> None:
    make = partial(LeavesOut, 1, rank=None, batch=batch)
    (expected,) = run_ranks(1, run_trainer, make, make_vectors, max_steps=4)
    strategy = partial(FSDP2Strategy, PLANS[plan])
    for result in run_ranks(2, run_trainer, make, make_vectors, strategy=strategy, max_steps=4):
        assert_parity(result, expected)


class Detaches(Regression):
    """On one rank the loss does not reach the block in the middle, which then trades places with another."""

    def __init__(self) -> None:
        super().__init__()
        self.net[1].requires_grad_(False)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        x, targets = batch
        first, middle, last = self.net[0]
        hidden = first(x)
        other = middle(hidden)
        hidden = hidden + (other.detach() if dist.get_rank() == 1 else other)
        return (self.net[1](last(hidden)) - targets).pow(2).mean()


def detached() -> str:
    plan = Plan(dp_shard=2, reshard_after_forward=False)  # resharded blocks would wait for each other's gathers
    with pytest.raises(RuntimeError) as caught:
        run_trainer(Detaches, make_vectors, strategy=lambda: FSDP2Strategy(plan), max_steps=2)
    return str(caught.value)


def test_all_ranks_are_told_of_a_block_that_one_leaves_out_of_backward() -> None:
    first, second = run_ranks(2, detached, timeout_s=60)
    assert first == second
    assert "averaged the gradients of different blocks" in first


class SaysMore(TinyLlama):
    """Generates a different number of tokens on each rank."""

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        count = 2 + 3 * self.global_rank
        tokens = self.model.generate(batch[0][:1, :4], max_new_tokens=count, do_sample=False, pad_token_id=0)
        self.said = tokens[0, 4:].tolist()


def said(strategy: str) -> list[int]:
    module = SaysMore()
    trainer = Trainer(**QUIET, strategy=strategy, devices=dist.get_world_size(), limit_val_batches=1)
    trainer.validate(module, make_tokens(0, 1), verbose=False)
    return list(module.said)


def test_ranks_may_generate_texts_of_different_lengths() -> None:
    whole = run_ranks(2, said, "tuned-ddp")
    assert len(whole[0]) < len(whole[1])
    assert run_ranks(2, said, "fsdp2") == whole


def test_the_watch_adds_no_collective_to_a_step() -> None:
    step = run_ranks(2, run_trainer, Regression, make_vectors, strategy="fsdp2", max_steps=2)[0].collectives[1]
    assert set(step.counts) == {"all_gather", "reduce_scatter"}
