"""The core of the suite: whatever the layout, the numbers are those of one process on the same global batch."""

from functools import cache, partial
from typing import Any

import pytest
from helpers.checkered import checkered
from helpers.llama import TinyLlama, Training, make_tokens

from lightning_shard import AutoShardStrategy, FSDP2Strategy
from lightning_shard.testing import RunResult, assert_parity, run_ranks, run_trainer

STEPS = 5
LAYOUTS: dict[str, tuple[int, Any]] = {
    "ddp-2": (2, "tuned-ddp"),
    "fsdp2-2": (2, "fsdp2"),
    "fsdp2-4": (4, "fsdp2"),
    "auto-2": (2, "auto-shard"),
}
MORE_LAYOUTS: dict[str, tuple[int, Any]] = {
    "one": (1, "auto-shard"),
    "fsdp2-1": (1, "fsdp2"),
    "hsdp-2x2": (4, partial(FSDP2Strategy, dp_shard=2)),
    "kept-2": (2, partial(FSDP2Strategy, reshard_after_forward=False)),
    "kept-over-2-of-4": (4, partial(FSDP2Strategy, reshard_after_forward=2)),
    "deferred-2": (2, partial(FSDP2Strategy, defer_gradient_sync=True)),
    "prefetch-2": (2, partial(FSDP2Strategy, prefetch=2)),
    "auto-sharded-2": (2, partial(AutoShardStrategy, pin={"dp_shard": 2})),
}
LOOPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.1},
    "accumulated": {"accumulate_grad_batches": 2},
    "clipped-accumulated": {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2},
}


def run(num_ranks: int, strategy: Any, make: Any, loop: str) -> list[RunResult]:
    return run_ranks(num_ranks, run_trainer, make, make_tokens, strategy=strategy, max_steps=STEPS, **LOOPS[loop])


@cache
def one_process(training: Training, tied: bool, loop: str) -> RunResult:
    (result,) = run(1, "auto", partial(TinyLlama, training, tied=tied), loop)
    assert len(result.losses) == STEPS * (2 if "accumulated" in loop else 1)
    return result


@pytest.mark.parametrize(*checkered(layout=LAYOUTS, training=["full", "lora"], head=["untied", "tied"], loop=LOOPS))
def test_losses_and_parameters_are_those_of_one_process(layout: str, training: Training, head: str, loop: str) -> None:
    tied = head == "tied"
    num_ranks, strategy = LAYOUTS[layout]
    for result in run(num_ranks, strategy, partial(TinyLlama, training, tied=tied), loop):
        assert_parity(result, one_process(training, tied, loop))


@pytest.mark.parametrize("training", ["full", "lora"])
@pytest.mark.parametrize("layout", MORE_LAYOUTS)
def test_every_option_keeps_the_numbers(layout: str, training: Training) -> None:
    num_ranks, strategy = MORE_LAYOUTS[layout]
    for result in run(num_ranks, strategy, partial(TinyLlama, training, tied=True), "clipped-accumulated"):
        assert_parity(result, one_process(training, True, "clipped-accumulated"))


@pytest.mark.parametrize("layout", ["ddp-2", "fsdp2-2", "auto-2"])
def test_a_model_built_in_configure_model_keeps_the_numbers(layout: str) -> None:
    num_ranks, strategy = LAYOUTS[layout]
    for result in run(num_ranks, strategy, partial(TinyLlama, "lora", late=True), "plain"):
        assert_parity(result, one_process("lora", False, "plain"))


class DoubledGradients(TinyLlama):
    def on_before_optimizer_step(self, _: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad *= 2


def test_gradients_of_the_wrong_scale_would_be_noticed() -> None:
    (doubled,) = run(1, "auto", DoubledGradients, "plain")
    with pytest.raises(AssertionError, match="Loss of batch"):
        assert_parity(doubled, one_process("full", False, "plain"))
