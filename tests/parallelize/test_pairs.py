"""All-gathers of two ranks on the host: an exchange that gives, and counts as, what the collective does."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_shard._compat import all_gather_single
from lightning_shard.parallelize import pairs
from lightning_shard.testing import count_collectives, ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@ranks(2)
def test_an_exchange_is_an_all_gather(dtype: torch.dtype) -> None:
    """Also with several under way that are waited for in another order."""
    group = dist.group.WORLD
    assert group is not None
    assert pairs.is_pair(group, "cpu")
    for numel in (1, 1000, 300_000):
        source = torch.randint(0, 100, (numel,)).to(dtype) + dist.get_rank()
        expected, apart, inside = (torch.empty(2 * numel, dtype=dtype) for _ in range(3))
        all_gather_single(expected, source)
        share = inside.chunk(2)[dist.get_rank()].copy_(source)  # FSDP's share lies where it belongs already
        with count_collectives() as counted:
            works = [pairs.gather(apart, source, group), pairs.gather(inside, share, group)]
            for work in reversed(works):
                work.wait()
        assert torch.equal(apart, expected)
        assert torch.equal(inside, expected)
        assert counted.calls == [("all_gather", expected.nbytes)] * 2


@pytest.mark.parametrize("op", ["SUM", "AVG"])
@ranks(2)
def test_an_exchange_is_a_reduce_scatter(op: str) -> None:
    group = dist.group.WORLD
    assert group is not None
    for numel in (1, 1000, 300_000):
        source = torch.arange(2.0 * numel) + 3 * dist.get_rank()
        expected = source.clone()
        dist.all_reduce(expected, op=getattr(dist.ReduceOp, op))
        output = torch.empty(numel)
        with count_collectives() as counted:
            work = pairs.reduce_scatter(output, source, group, getattr(dist.ReduceOp, op))
            work.wait()
            work.wait()
        assert torch.equal(output, expected.chunk(2)[dist.get_rank()])
        assert counted.calls == [("reduce_scatter", source.nbytes)]


@ranks(2)
def test_a_pair_takes_no_maximum() -> None:
    group = dist.group.WORLD
    assert group is not None
    with pytest.raises(ValueError, match=r"SUM or AVG, not by .*MAX"):
        pairs.reduce_scatter(torch.empty(1), torch.ones(2), group, dist.ReduceOp.MAX)


@ranks(2)
def test_a_rank_that_stays_away_is_noticed_after_the_time_out() -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    assert isinstance(group, dist.ProcessGroup)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="imed out"):
            pairs.gather(torch.empty(8), torch.ones(4), group).wait()
    dist.barrier()
    dist.destroy_process_group(group)
