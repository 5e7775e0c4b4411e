"""A sharded module is laid out by another plan in the middle of a run, its optimizer's state with it."""

import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.llama import TinyLlama, make_tokens
from lightning.pytorch import Callback, Trainer
from torch.distributed.fsdp import FSDPModule

from lightning_shard import FSDP2Strategy, Plan
from lightning_shard.strategies.remap import lay_out_under
from lightning_shard.testing import run_ranks, run_trainer
from lightning_shard.testing.parity import QUIET, trained_parameters

FULL = Plan(dp_shard=2)
KEPT = Plan(dp_shard=2, reshard_after_forward=False, prefetch=2)
RECOMPUTING = Plan(dp_shard=2, activation_checkpoint="full", prefetch=0)
RESIDENT = Plan(dp_shard=2, resident_blocks=1, adapters="replicated")
ALL_RESIDENT = Plan(dp_shard=2, resident_blocks=9, adapters="replicated")
WHOLE = Plan(dp_replicate=2)
HYBRID = Plan(dp_replicate=2, dp_shard=2)

SLOW = pytest.mark.slow
CHANGES = [
    pytest.param("lora", RESIDENT, RECOMPUTING, id="resident-recomputing"),
    pytest.param("full", KEPT, FULL, id="kept-full", marks=SLOW),
    pytest.param("lora", ALL_RESIDENT, FULL, id="all-resident-full", marks=SLOW),
    pytest.param("lora", FULL, RESIDENT, id="full-resident", marks=SLOW),
    pytest.param("full", FULL, WHOLE, id="full-whole", marks=SLOW),
    pytest.param("full", WHOLE, KEPT, id="whole-kept", marks=SLOW),
    pytest.param("full", HYBRID, Plan(dp_shard=4), id="hybrid-four", marks=SLOW),
    pytest.param("full", Plan(dp_shard=4, reshard_after_forward=2), HYBRID, id="four-hybrid", marks=SLOW),
]


class Anew(Callback):
    """Lays the module out by the next of ``plans`` after every step."""

    def __init__(self, *plans: Plan) -> None:
        self.plans = list(plans)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step and self.plans:
            plan, strategy = self.plans.pop(0), trainer.strategy
            assert isinstance(strategy, FSDP2Strategy)
            strategy._rest()
            lay_out_under(strategy.optimizers, pl_module, lambda: strategy.lay_out_anew(plan))


def fit(training: str, precision: Any, *plans: Plan, tied: bool = False) -> dict[str, Any]:
    strategy = FSDP2Strategy(plans[0]) if plans[0].strategy == "fsdp2" else None
    if strategy is None:
        strategy = FSDP2Strategy(FULL)
        plans = (FULL, *plans)
    world = dist.get_world_size()
    trainer = Trainer(
        **QUIET, strategy=strategy, devices=world, max_steps=4, precision=precision, callbacks=[Anew(*plans[1:])]
    )  # fmt: skip
    module = TinyLlama(training, tied=tied)
    trainer.fit(module, make_tokens(dist.get_rank(), world))
    assert strategy.plan == plans[-1]
    kinds = [type(part).__name__ for part in module.modules() if isinstance(part, FSDPModule)]
    return {"parameters": trained_parameters(module), "kinds": kinds}


@pytest.mark.parametrize(("training", "first", "second"), CHANGES)
def test_training_goes_on_as_if_nothing_happened(training: str, first: Plan, second: Plan) -> None:
    (wanted,) = run_ranks(1, run_trainer, partial(TinyLlama, training), make_tokens, max_steps=4)
    for result in run_ranks(second.world_size, fit, training, "32-true", first, second):
        assert_same(result["parameters"], wanted.parameters)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("training", ["lora", "full"])
def test_masters_and_casts_follow(training: str, precision: str) -> None:
    """To and fro gives the bits of a run that stayed."""
    moved = run_ranks(2, fit, training, precision, RESIDENT, RECOMPUTING, RESIDENT)[0]
    stayed = run_ranks(2, fit, training, precision, RESIDENT)[0]
    assert moved["kinds"] == stayed["kinds"]
    assert_same(moved["parameters"], stayed["parameters"])


@pytest.mark.slow
def test_ties_stay() -> None:
    (wanted,) = run_ranks(1, run_trainer, partial(TinyLlama, "full", tied=True), make_tokens, max_steps=4)
    for result in run_ranks(2, fit, "full", "32-true", KEPT, RECOMPUTING, FULL, tied=True):
        assert_same(result["parameters"], wanted.parameters)


def assert_same(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert set(actual) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-6, msg=name)


def whole_parameters_alive() -> list[int]:
    """Bytes of the parameters that a module was built with, after it was sharded; and how many of those that it got
    then, after it was again."""
    module = TinyLlama("full")
    built = [weakref.ref(parameter) for parameter in module.parameters()]
    strategy = FSDP2Strategy(KEPT)
    Trainer(**QUIET, strategy=strategy, devices=2, max_steps=1).fit(module, make_tokens(dist.get_rank(), 2))
    first = [weakref.ref(parameter) for parameter in module.parameters()]
    gc.collect()
    alive = [sum(r is not None and r.untyped_storage().nbytes() for r in (ref() for ref in built))]
    lay_out_under(strategy.optimizers, module, lambda: strategy.lay_out_anew(FULL))
    gc.collect()
    return [*alive, sum(ref() is not None for ref in first)]


def test_nothing_keeps_what_was_whole_in_memory() -> None:
    assert run_ranks(2, whole_parameters_alive) == [[0, 0]] * 2
