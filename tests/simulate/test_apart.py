"""Simulating beside a process group that is in use: in a process of its own."""

import functools

import pytest
import torch
from helpers.llama import TinyLlama, make_llama

from lightning_shard.plans import Plan
from lightning_shard.simulate import simulate, simulate_in_subprocess
from lightning_shard.specs import TrainSpec
from lightning_shard.testing import ranks

TRAIN = TrainSpec(micro_batch_size=2, seq_len=16)
TOKENS = torch.zeros(2, 16, dtype=torch.long)


@ranks(2)
def test_ranks_of_a_real_group_can_simulate_a_live_module() -> None:
    module, plan = TinyLlama("lora"), Plan(dp_shard=2)
    with pytest.raises(RuntimeError, match="simulate_in_subprocess"):
        simulate(module, TRAIN, plan, batch=[TOKENS])
    result = simulate_in_subprocess(module, TRAIN, plan, batch=[TOKENS])
    assert result.count("all_gather") > 0


def test_the_figures_are_those_of_this_process() -> None:
    model = functools.partial(make_llama, num_hidden_layers=2)
    apart = simulate_in_subprocess(model, TRAIN, Plan(dp_shard=2))
    here = simulate(model, TRAIN, Plan(dp_shard=2))
    assert apart.moments == here.moments
    assert apart.collectives == here.collectives


def test_errors_come_back() -> None:
    with pytest.raises(ValueError, match="optimizer='lion' cannot be simulated"):
        simulate_in_subprocess(make_llama, TrainSpec(seq_len=16, optimizer="lion"), Plan())


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be sent to another process"):
        simulate_in_subprocess(lambda: make_llama(), TRAIN, Plan())
