"""Nodes and replicas (cases C7, K8 and L12)."""

import os
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.regression import Regression, make_vectors
from lightning.pytorch import Trainer

from lightning_shard import AdapterSpec, AutoShardStrategy, Cluster, FSDP2Strategy, ModelSpec, TrainSpec, plan
from lightning_shard.hardware import find_device, find_link
from lightning_shard.plans import Plan
from lightning_shard.testing import run_ranks, run_trainer
from lightning_shard.testing.parity import QUIET

PLENTY = 2**33


def accumulate(strategy: Any, batches: int) -> tuple[list[dict[str, int]], dict[str, torch.Tensor]]:
    """Collectives of each micro-batch, and what was learned."""
    result = run_trainer(Regression, make_vectors, strategy=strategy, accumulate_grad_batches=batches, max_epochs=1)
    return [dict(counted.counts) for counted in result.collectives], result.parameters


def test_c7_replicas_of_shards_meet_once_a_step() -> None:
    (_, expected), *_ = run_ranks(1, accumulate, "auto", 2)
    for counts, learned in run_ranks(4, accumulate, partial(FSDP2Strategy, dp_shard=2), 2):
        between, boundary, *_ = counts
        assert between.get("all_reduce", 0) == 0
        assert between["reduce_scatter"] > 0  # shards still add up inside the node
        assert boundary["all_reduce"] == boundary["reduce_scatter"] == between["reduce_scatter"]
        torch.testing.assert_close(learned, expected, rtol=1e-5, atol=1e-6)


def decide(nodes: int, devices: int, memory: list[int]) -> tuple[Plan, int, int]:
    """Plan, world size and the sampler's share, on this rank of so many nodes, with memory of its own."""
    rank = dist.get_rank()
    os.environ.update(
        {"LOCAL_WORLD_SIZE": str(devices), "LOCAL_RANK": str(rank % devices), "GROUP_RANK": str(rank // devices)}
    )
    strategy = AutoShardStrategy(device_memory=memory[rank], train=TrainSpec(precision="32-true", seq_len=1))
    trainer = Trainer(**QUIET, strategy=strategy, num_nodes=nodes, devices=devices, max_steps=1)
    trainer.fit(Regression(), make_vectors(rank, dist.get_world_size()))
    return strategy.plan, trainer.world_size, strategy.distributed_sampler_kwargs["num_replicas"]


@pytest.mark.parametrize(("nodes", "devices"), [(2, 2), (4, 1)])
def test_k8_the_world_is_nodes_times_devices(nodes: int, devices: int) -> None:
    for chosen, world, shares in run_ranks(4, decide, nodes, devices, [PLENTY] * 4):
        assert (chosen.world_size, world, shares) == (4, 4, 4)


def forget_nodes() -> str:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    trainer = Trainer(**QUIET, strategy="auto-shard", devices=2, max_steps=1)
    with pytest.raises(ValueError, match="world size") as caught:
        trainer.fit(Regression(), make_vectors(0, 1))
    return str(caught.value)


def test_k8_a_forgotten_num_nodes_is_refused_on_all_ranks() -> None:
    for said in run_ranks(4, forget_nodes):
        assert "(2 * 1) does not match the world size (4)" in said


def test_l12_ranks_with_other_memory_take_one_answer() -> None:
    memory = [PLENTY, PLENTY // 2, PLENTY // 4, PLENTY // 3]
    answers = [chosen for chosen, _, _ in run_ranks(4, decide, 2, 2, memory)]
    assert len(set(answers)) == 1


def test_l12_a_base_that_is_too_large_for_each_device_is_no_more_so_on_fewer() -> None:
    """The sharded part of the need falls with the devices; a whole copy's does not."""
    model = ModelSpec.from_pretrained(os.path.join(os.path.dirname(__file__), "../planner/configs/llama-3-70b"))
    train = TrainSpec(seq_len=2048, adapter=AdapterSpec(r=16))
    whole = [needs(model, train, nodes, dp_shard=1) for nodes in (1, 2)]
    sharded = [needs(model, train, nodes, dp_shard=8 * nodes) for nodes in (1, 2)]
    assert whole[0] == pytest.approx(whole[1], rel=0.01)
    assert sharded[1] < sharded[0] < whole[0]


def needs(model: ModelSpec, train: TrainSpec, nodes: int, *, dp_shard: int) -> int:
    device = find_device("h100-sxm")
    assert device is not None
    cluster = Cluster(
        num_nodes=nodes, devices_per_node=8, device=device, intra_link=find_link("nvlink4"), inter_link=find_link("ib400")
    )  # fmt: skip
    pin = {"dp_shard": dp_shard, "activation_checkpoint": "full", "resident_blocks": 0}
    return plan(model, train, cluster, pin=pin).estimate.device_bytes


def test_shards_stay_inside_a_node_where_the_network_between_them_is_slow() -> None:
    """HSDP: a copy of an 8B base needs two devices of 24 GB or more; ten-gigabit Ethernet gathers none of it."""
    model = ModelSpec.from_pretrained(os.path.join(os.path.dirname(__file__), "../planner/configs/llama-3.1-8b"))
    device = find_device("rtx-4090")
    assert device is not None
    cluster = Cluster(
        num_nodes=2, devices_per_node=8, device=device, intra_link=find_link("pcie4-no-p2p"), inter_link=find_link("eth10")
    )  # fmt: skip
    decision = plan(model, TrainSpec(seq_len=2048, adapter=AdapterSpec(r=16)), cluster)
    assert decision.fits
    assert decision.plan.dp_shard * decision.plan.tp <= 8
    assert decision.plan.dp_replicate >= 2
