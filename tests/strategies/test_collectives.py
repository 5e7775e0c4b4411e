"""What each layout sends for every step: counted, and compared with what the model's sizes say."""

from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from helpers.llama import NUM_BLOCKS, TinyLlama, Training, make_tokens

from lightning_shard import FSDP2Strategy
from lightning_shard.testing import Collectives, count_collectives, ranks, run_ranks, run_trainer

FLOAT = 4


def block_bytes(training: Training, *, trained_only: bool = False) -> int:
    """Bytes of one block's parameters."""
    block = TinyLlama(training).get_submodule("model.base_model.model.model.layers.0" if training == "lora" else FULL)
    return sum(FLOAT * p.numel() for p in block.parameters() if p.requires_grad or not trained_only)


FULL = "model.model.layers.0"


def trained_bytes(training: Training) -> int:
    return sum(FLOAT * p.numel() for p in TinyLlama(training).parameters() if p.requires_grad)


def steps_of(num_ranks: int, strategy: Any, training: Training, **options: Any) -> tuple[Collectives, ...]:
    """What rank 0 sent for each of three batches."""
    results = run_ranks(
        num_ranks, run_trainer, partial(TinyLlama, training), make_tokens, strategy=strategy, limit_train_batches=3,
        max_epochs=1, **options,
    )  # fmt: skip
    counted: tuple[Collectives, ...] = results[0].collectives
    assert len(counted) == 3
    return counted


def num_of_size(step: Collectives, kind: str, num_bytes: int) -> int:
    return step.calls.count((kind, num_bytes))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("training", ["full", "lora"])
def test_a_sharded_block_is_gathered_once_per_pass_and_reduced_once(training: Training, num_ranks: int) -> None:
    for step in steps_of(num_ranks, "fsdp2", training):
        assert num_of_size(step, "all_gather", block_bytes(training)) == 2 * NUM_BLOCKS
        assert num_of_size(step, "reduce_scatter", block_bytes(training, trained_only=True)) == NUM_BLOCKS
        if training == "lora":  # nothing but blocks trains
            assert step["reduce_scatter"] == NUM_BLOCKS
        assert step["all_reduce"] == 0


def test_a_block_that_is_kept_is_gathered_once() -> None:
    for step in steps_of(2, partial(FSDP2Strategy, reshard_after_forward=False), "lora"):
        assert num_of_size(step, "all_gather", block_bytes("lora")) == NUM_BLOCKS


def test_replicas_of_shards_reduce_once_more() -> None:
    for step in steps_of(4, partial(FSDP2Strategy, dp_shard=2), "lora"):
        assert num_of_size(step, "all_gather", block_bytes("lora")) == 2 * NUM_BLOCKS
        assert step["reduce_scatter"] == NUM_BLOCKS
        assert step["all_reduce"] == NUM_BLOCKS
        assert step.num_bytes["all_reduce"] == NUM_BLOCKS * block_bytes("lora", trained_only=True) // 2


@pytest.mark.parametrize("strategy", ["tuned-ddp", "auto-shard"])
@pytest.mark.parametrize("training", ["full", "lora"])
def test_replicated_training_reduces_the_bytes_that_train(strategy: str, training: Training) -> None:
    for step in steps_of(2, strategy, training):
        assert step.num_bytes["all_reduce"] == trained_bytes(training)
        assert step["all_gather"] == step["reduce_scatter"] == 0


def test_replicated_training_sends_nothing_but_gradients() -> None:
    first, second, third = steps_of(2, "tuned-ddp", "lora")
    assert set(first.counts) == set(third.counts) == {"all_reduce"}
    # Once, DDP agrees on the order in which gradients came, and puts its buckets in that order.
    assert second.num_bytes["broadcast"] < 1024


@pytest.mark.parametrize("strategy", ["tuned-ddp", "auto-shard"])
def test_only_the_last_accumulated_batch_reduces(strategy: str) -> None:
    steps = steps_of(2, strategy, "lora", accumulate_grad_batches=3)
    assert [step["all_reduce"] for step in steps] == [0, 0, 1]


@pytest.mark.parametrize(("defer", "expected"), [(False, [NUM_BLOCKS] * 3), (True, [0, 0, NUM_BLOCKS])])
def test_shards_reduce_every_batch_unless_that_is_deferred(defer: bool, expected: list[int]) -> None:
    strategy = partial(FSDP2Strategy, defer_gradient_sync=defer)
    steps = steps_of(2, strategy, "lora", accumulate_grad_batches=3)
    assert [step["reduce_scatter"] for step in steps] == expected


@pytest.mark.parametrize("strategy", ["tuned-ddp", "fsdp2", "auto-shard"])
@ranks(1)
def test_one_device_needs_no_group_and_sends_nothing(strategy: str) -> None:
    dist.destroy_process_group()
    with count_collectives() as counted:
        run_trainer(TinyLlama, make_tokens, strategy=strategy, max_steps=2)
    assert counted.calls == []
    assert not dist.is_initialized()


@ranks(2)
def test_clipping_a_sharded_norm_takes_one_number() -> None:
    plain = run_trainer(TinyLlama, make_tokens, strategy="fsdp2", max_steps=2)
    clipped = run_trainer(TinyLlama, make_tokens, strategy="fsdp2", max_steps=2, gradient_clip_val=1.0)
    for step, step_with_clipping in zip(plain.collectives, clipped.collectives, strict=True):
        extra = step_with_clipping.counts - step.counts
        assert extra == {"all_reduce": 1}
        assert step_with_clipping.num_bytes["all_reduce"] == FLOAT
