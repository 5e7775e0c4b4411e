"""Simulating beside a process group that is in use, in this process or in one of its own."""

import functools

import pytest
import torch
import torch.distributed as dist
from helpers.llama import TinyLlama, make_llama
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_shard.plans import Plan
from lightning_shard.simulate import simulate, simulate_in_subprocess
from lightning_shard.specs import TrainSpec
from lightning_shard.testing import run_ranks

TRAIN = TrainSpec(micro_batch_size=2, seq_len=16)
TOKENS = torch.zeros(2, 16, dtype=torch.long)


def simulate_then_reduce(*, apart: bool) -> tuple[int, float]:
    """On rank 0 of a real group, while the others wait; then all ranks use the group and shard a tensor on it."""
    module, plan = TinyLlama("lora"), Plan(dp_shard=2)
    count = 0
    if dist.get_rank() == 0:
        result = (simulate_in_subprocess if apart else simulate)(module, TRAIN, plan, batch=[TOKENS])
        count = result.count("all_gather")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    whole = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]).add(1).full_tensor()
    return count, float(whole.sum())


@pytest.mark.parametrize("apart", [pytest.param(False, marks=pytest.mark.slow), True])
def test_one_rank_of_a_real_group_can_simulate_a_live_module(apart: bool) -> None:
    (count, total), (_, other) = run_ranks(2, simulate_then_reduce, apart=apart)
    assert count > 0
    assert total == other == 10


@pytest.mark.slow
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
