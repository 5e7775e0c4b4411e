"""Shards brought together in one message are what ``full_tensor`` gives, whatever way they are split."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_shard._compat.storage import copy_on_host
from lightning_shard.checkpoint.gathering import gather_on_first, in_one_piece
from lightning_shard.testing import run_ranks


def gathered() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "dp"))
    torch.manual_seed(0)
    whole = {
        "uneven": (torch.randn(5, 3), flat, [Shard(0)]),  # one rank has two rows, and with 4 ranks another has none
        "fewer rows than ranks": (torch.randn(2, 3), flat, [Shard(0)]),
        "columns": (torch.randn(3, 8), flat, [Shard(1)]),
        "replicas of shards": (torch.randn(4, 2), grid, [Replicate(), Shard(0)]),
        "both axes": (torch.randn(4, 4), grid, [Shard(0), Shard(1)]),
        "twice the same": (torch.randn(8, 2), grid, [Shard(0), Shard(0)]),
        "half": (torch.randn(4, 4).bfloat16(), flat, [Shard(0)]),
    }
    values = {name: distribute_tensor(value, mesh, places) for name, (value, mesh, places) in whole.items()}
    values = {name: in_one_piece(value) for name, value in values.items()}
    values["plain"] = torch.arange(3.0)
    copies = {name: copy_on_host(value) for name, value in values.items()}
    for value in values.values():  # training goes on
        (value.to_local() if isinstance(value, DTensor) else value).zero_()
    found = gather_on_first(copies, dist.group.WORLD)
    assert bool(found) == (dist.get_rank() == 0)
    expected = {**{name: value for name, (value, *_) in whole.items()}, "plain": torch.arange(3.0)}
    return {name: (found[name], expected[name]) for name in expected} if found else {}


def test_shards_of_every_kind_are_whole_on_the_first_rank() -> None:
    first, *others = run_ranks(4, gathered)
    assert len(first) == 8
    assert not any(others)
    for name, (found, expected) in first.items():
        assert torch.equal(found, expected), name
