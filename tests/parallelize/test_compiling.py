"""Per-block compilation: same numbers, plain names, one graph for equal blocks."""

from functools import partial

import pytest
import torch
from helpers.llama import TinyLlama, make_llama, make_tokens

from lightning_shard import FSDP2Strategy, Plan
from lightning_shard.parallelize import parallelize
from lightning_shard.specs import find_precision
from lightning_shard.testing import assert_parity, run_ranks, run_trainer

PLANS = {
    "ddp": Plan(dp_replicate=2, compile=True),
    "fsdp2": Plan(dp_shard=2, compile=True),
    "fsdp2-recomputing": Plan(dp_shard=2, compile=True, activation_checkpoint="full"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_compiling_keeps_the_numbers(name: str) -> None:
    options = {"max_steps": 3, "gradient_clip_val": 0.1}
    make = partial(TinyLlama, "lora")
    expected = run_ranks(2, run_trainer, make, make_tokens, strategy="tuned-ddp", **options)[0]
    strategy = partial(FSDP2Strategy, PLANS[name])
    actual = run_ranks(2, run_trainer, make, make_tokens, strategy=strategy, timeout_s=500, **options)[0]
    assert_parity(actual, expected, rtol=2e-5)


def test_names_stay_plain() -> None:
    model = make_llama()
    names = list(model.state_dict())
    plan = Plan(compile=True, activation_checkpoint="full")
    parallelize(model, plan, precision=find_precision("32-true"), device=torch.device("cpu"))
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_parameters()] == names
