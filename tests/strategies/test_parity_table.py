"""The table of plans: layouts, ways to train and recomputing, any two of them together, against one process.

Compiled steps are in ``tests/parallelize/test_compiling.py``.
"""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
from helpers.llama import TinyLlama, Training, make_tokens

from lightning_shard import AutoShardStrategy, Plan
from lightning_shard.testing import RunResult, assert_parity, run_ranks, run_trainer

PLANS: dict[str, dict[str, Any]] = {
    "ddp-2": {"dp_replicate": 2},
    "fsdp2-2": {"dp_shard": 2},
    "fsdp2-4": {"dp_shard": 4},
    "hsdp-2x2": {"dp_replicate": 2, "dp_shard": 2},
    "tp-2": {"tp": 2},
    "fsdp2-x-tp-2x2": {"dp_shard": 2, "tp": 2},
    "half-resident": {"dp_shard": 2, "resident_blocks": 2, "adapters": "replicated"},
    "sharded-adapters": {"dp_shard": 2, "resident_blocks": 2, "adapters": "sharded"},
    "offload": {"dp_shard": 2, "offload": "all"},
    "offload-update": {"dp_shard": 2, "offload": "optimizer"},
}
METHODS: tuple[Training, ...] = ("lora", "dora", "full")
OPTIONS = {"max_steps": 4, "gradient_clip_val": 0.1, "accumulate_grad_batches": 2}


@cache
def one_process(method: Training) -> RunResult:
    return run_ranks(1, run_trainer, partial(TinyLlama, method), make_tokens, **OPTIONS)[0]


def tokens_of_data_rank(tp: int, rank: int, world_size: int) -> Any:
    return make_tokens(rank // tp, world_size // tp)


def cells() -> Iterator[Any]:
    """Every other cell of the table; LoRA and full without recomputing by default."""
    for row, layout in enumerate(PLANS):
        for column, method in enumerate(METHODS):
            for depth, recompute in enumerate(("none", "full", "selective")):
                if (row + column + depth) % 2 == 0:
                    yield pytest.param(
                        layout, method, recompute, marks=pytest.mark.slow if depth or column == 1 else ()
                    )


@pytest.mark.parametrize(("layout", "method", "recompute"), list(cells()))
def test_a_plan_changes_nothing_that_is_learned(layout: str, method: Training, recompute: str) -> None:
    plan = Plan(**PLANS[layout], activation_checkpoint=recompute)
    data, strategy = partial(tokens_of_data_rank, plan.tp), partial(AutoShardStrategy, plan=plan)
    arguments: dict[str, Any] = {"strategy": strategy, **OPTIONS}
    for result in run_ranks(plan.world_size, run_trainer, partial(TinyLlama, method), data, **arguments):
        assert_parity(result, one_process(method))
