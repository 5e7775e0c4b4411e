"""Collectives are counted wherever they come from, against counts worked out by hand."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_shard.testing import Collectives, count_collectives, ranks

FLOAT = 4


def two_blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))


@ranks(2)
def test_calls_by_hand() -> None:
    value = torch.ones(6)
    with count_collectives() as counted:
        dist.all_reduce(value)
        dist.broadcast(value, src=0)
        dist.all_gather([torch.empty(6), torch.empty(6)], value)
        dist.all_gather_into_tensor(torch.empty(12), value)
        dist.reduce_scatter_tensor(torch.empty(3), value)
        dist.barrier()
    assert [kind for kind, _ in counted.calls] == [
        "all_reduce", "broadcast", "all_gather", "all_gather", "reduce_scatter", "barrier",
    ]  # fmt: skip
    assert counted.num_bytes == {
        "all_reduce": 6 * FLOAT, "broadcast": 6 * FLOAT, "all_gather": 2 * 12 * FLOAT, "reduce_scatter": 6 * FLOAT,
        "barrier": counted.num_bytes["barrier"],
    }  # fmt: skip
    dist.all_reduce(value)
    assert counted["all_reduce"] == 1, "what comes after the block does not count"


@ranks(2)
def test_point_to_point_and_all_to_all() -> None:
    value = torch.ones(6)
    with count_collectives() as counted:
        if dist.get_rank() == 0:
            dist.send(value, dst=1)
        else:
            dist.recv(value, src=0)
        dist.all_to_all_single(torch.empty(6), value)
    assert counted["send"] + counted["recv"] == 1
    assert counted["all_to_all"] == 1
    assert counted.num_bytes["all_to_all"] == 6 * FLOAT


@ranks(2)
def test_the_reducer_of_ddp() -> None:
    model = DistributedDataParallel(two_blocks())
    for step in range(3):
        with count_collectives() as counted:
            model(torch.ones(2, 8)).sum().backward()
        assert counted["all_reduce"] == 1, f"step {step}"
        assert counted.num_bytes["all_reduce"] == 2 * 64 * FLOAT
    with count_collectives() as counted, model.no_sync():
        model(torch.ones(2, 8)).sum().backward()
    assert counted["all_reduce"] == 0


@ranks(2)
def test_a_communication_hook_of_ddp() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DistributedDataParallel(two_blocks())
    model.register_comm_hook(None, fp16_compress_hook)
    with count_collectives() as counted:
        model(torch.ones(2, 8)).sum().backward()
    assert counted["all_reduce"] == 1
    assert counted.num_bytes["all_reduce"] == 2 * 64 * FLOAT // 2


@pytest.mark.parametrize(("reshard", "gathers"), [(True, 4), (False, 2)])
@ranks(2)
def test_blocks_of_fsdp2(reshard: bool, gathers: int) -> None:
    model = two_blocks()
    for block in model:
        fully_shard(block, reshard_after_forward=reshard)
    fully_shard(model)
    with count_collectives() as counted:
        model(torch.ones(2, 8)).sum().backward()
    assert counted["all_gather"] == gathers
    assert counted["reduce_scatter"] == 2
    assert counted.num_bytes == {"all_gather": gathers * 64 * FLOAT, "reduce_scatter": 2 * 64 * FLOAT}


@ranks(2)
def test_redistribution_of_dtensors_and_the_norm() -> None:
    model = two_blocks()
    fully_shard(model)
    model(torch.ones(2, 8)).sum().backward()
    with count_collectives() as counted:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert isinstance(norm, DTensor)
        norm.full_tensor()
    assert counted.counts == {"all_reduce": 1}
    with count_collectives() as counted:
        model[0].weight.full_tensor()
    assert counted.counts == {"all_gather": 1}


def test_no_such_kind() -> None:
    with pytest.raises(KeyError, match="'allreduce' is no kind of collective; they are all_gather"):
        Collectives()["allreduce"]
