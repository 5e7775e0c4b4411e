"""The table of plans: layouts, ways to train and recomputing, any two of them together, against one process; and the
layouts again with compiled blocks (cases I1 and I3), whose graphs run as torch's operators, since generating their code
would take minutes and is torch's own (``tests/parallelize/test_compiling.py`` does it once).
"""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch
from helpers.llama import TinyLlama, Training, make_llama, make_tokens

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


class Trained(TinyLlama):
    """With as many key heads as query heads: what several of those share is summed in an order that tp changes."""

    def _build(self) -> None:
        self.model = self.adapted(make_llama(num_key_value_heads=4))


@cache
def one_process(method: Training) -> RunResult:
    return run_ranks(1, run_trainer, partial(Trained, method), make_tokens, **OPTIONS)[0]


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
    for result in run_ranks(plan.world_size, run_trainer, partial(Trained, method), data, **arguments):
        assert_parity(result, one_process(method))


class Watched(Trained):
    """Notes how many graphs there are after every batch."""

    def __init__(self, method: Training) -> None:
        super().__init__(method)
        self.graphs: list[int] = []
        torch._dynamo.reset()  # what an earlier test compiled in this process
        torch._dynamo.utils.counters.clear()

    def on_train_batch_end(self, *_: Any) -> None:
        self.graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def compiled(method: Training, data: Any, strategy: Any) -> tuple[RunResult, list[int], bool]:
    """What was learned, the graphs, and whether every name is as it was."""
    module = Watched(method)
    names = [*module.state_dict(), *dict(module.named_parameters())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        result = run_trainer(lambda: module, data, strategy=strategy, **OPTIONS)
    return result, module.graphs, names == [*module.state_dict(), *dict(module.named_parameters())]


COMPILED = ("ddp-2", "fsdp2-2", "hsdp-2x2", "tp-2", "half-resident", "sharded-adapters")
RECOMPUTED = {("fsdp2-2", "lora"): "full", ("half-resident", "lora"): "selective"}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("layout", COMPILED)
def test_i3_compiled_blocks_change_nothing(layout: str, method: Training) -> None:
    recompute: Any = RECOMPUTED.get((layout, method), "none")
    plan = Plan(**PLANS[layout], compile=True, activation_checkpoint=recompute)
    data, strategy = partial(tokens_of_data_rank, plan.tp), partial(AutoShardStrategy, plan=plan)
    for result, graphs, same_names in run_ranks(plan.world_size, compiled, method, data, strategy, timeout_s=300):
        assert_parity(result, one_process(method), rtol=2e-5)  # fused operators round once where others round twice
        assert same_names
        assert 1 <= graphs[0] <= 3, "equal blocks share a graph; the first one's input may need no gradient"
        assert graphs[1] == graphs[-1], "no compilation after the second batch"
