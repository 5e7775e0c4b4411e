"""Per-block compilation: same numbers, plain names, one graph for equal blocks."""

from functools import partial

import pytest
import torch
from helpers.llama import TinyLlama, make_llama, make_tokens

from lightning_shard import FSDP2Strategy, Plan
from lightning_shard.parallelize import parallelize
from lightning_shard.parallelize.compiling import compile_blocks
from lightning_shard.parallelize.units import Units
from lightning_shard.specs import find_precision
from lightning_shard.testing import assert_parity, run_ranks, run_trainer


@pytest.mark.slow
def test_generated_code_keeps_the_numbers() -> None:
    """Of other plans the graphs are checked without it (``tests/strategies/test_parity_table.py``)."""
    options = {"max_steps": 3, "gradient_clip_val": 0.1}
    make, plan = partial(TinyLlama, "lora"), Plan(dp_shard=2, compile=True, activation_checkpoint="full")
    (expected,) = run_ranks(1, run_trainer, make, make_tokens, **options)
    strategy = partial(FSDP2Strategy, plan)
    for result in run_ranks(2, run_trainer, make, make_tokens, strategy=strategy, timeout_s=500, **options):
        assert_parity(result, expected, rtol=2e-5)


def test_split_blocks_that_recompute_are_not_compiled_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    units = Units(make_llama(), blocks=[])
    compile_blocks(units, Plan(tp=2, compile=True))
    assert not caplog.messages
    compile_blocks(units, Plan(tp=2, compile=True, activation_checkpoint="full"))
    assert "blocks that recompute run uncompiled" in caplog.text


def test_names_stay_plain() -> None:
    model = make_llama()
    names = list(model.state_dict())
    plan = Plan(compile=True, activation_checkpoint="full")
    parallelize(model, plan, precision=find_precision("32-true"), device=torch.device("cpu"))
    assert list(model.state_dict()) == names
    assert [name for name, _ in model.named_parameters()] == names
