"""Compilation leaves names and the number of graphs as they should be (cases I1 and I4).

The plan's own compilation of blocks, its names and numbers: ``tests/strategies/test_parity_table.py``.
"""

from functools import partial
from typing import Any

import pytest
import torch
from helpers.llama import TinyLlama, make_tokens
from helpers.regression import Regression, block_net, make_vectors
from torch import Tensor

from lightning_shard import FSDP2Strategy, Plan
from lightning_shard.testing import RunResult, assert_parity, run_ranks, run_trainer

LAYOUTS = {
    "ddp": Plan(dp_replicate=2, compile=True),
    "fsdp2": Plan(dp_shard=2, compile=True),
}


class Names(Regression):
    def on_train_end(self) -> None:
        self.seen = [*self.state_dict(), *dict(self.named_parameters())]


class Compiled(Names):
    """Compiled by the user, in place: what is inside the module, and not the module itself."""

    def __init__(self) -> None:
        super().__init__(block_net)
        self.net.compile(backend="eager")


def step_compiled(plan: Plan) -> tuple[list[str], RunResult]:
    module = Compiled()
    result = run_trainer(lambda: module, make_vectors, strategy=partial(FSDP2Strategy, plan), max_steps=2)
    return module.seen, result


@pytest.mark.parametrize(
    "plan", [pytest.param(Plan(dp_replicate=2), marks=pytest.mark.slow), Plan(dp_shard=2)], ids=["ddp", "fsdp2"]
)
def test_i1_no_prefix_where_the_user_compiled_an_inner_module(plan: Plan) -> None:
    (expected,) = run_ranks(1, run_trainer, partial(Regression, block_net), make_vectors, max_steps=2)
    plain = Regression(block_net)
    for seen, result in run_ranks(2, step_compiled, plan):
        assert seen == [*plain.state_dict(), *dict(plain.named_parameters())]
        assert_parity(result, expected)


class Lengths(TinyLlama):
    """A new length in every step."""

    def __init__(self) -> None:
        super().__init__("lora")
        self.compiled: list[int] = []
        self.lengths = iter([5, 9, 17, 33, 64, 48, 21])

    def _build(self) -> None:
        super()._build()
        torch._dynamo.reset()  # what an earlier test compiled in this process
        torch._dynamo.utils.counters.clear()

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        length = next(self.lengths)
        tokens = torch.arange(length).remainder(60).repeat(len(batch[0]), 1)
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def compiled(plan: Plan) -> list[int]:
    module = Lengths()
    run_trainer(lambda: module, make_tokens, strategy=partial(FSDP2Strategy, plan), max_steps=7)
    return module.compiled


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_i4_lengths_are_compiled_for_at_most_twice(layout: str) -> None:
    for graphs in run_ranks(2, compiled, LAYOUTS[layout], timeout_s=500):
        assert graphs[0] >= 1
        assert graphs[-1] <= 2 * graphs[0], "once for the first length, once for all others"
        assert graphs[1] == graphs[-1], "no compilation after the second step"
