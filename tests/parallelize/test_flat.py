"""Flat gradients: averaged without copies, whatever backward does."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard.parallelize.flat import FlatGradients
from lightning_shard.testing import count_collectives, ranks, run_ranks


def make() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(3, 3) for _ in range(3))


def rows(rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


def loss_of(net: nn.ModuleList, x: Tensor, used: range = range(3)) -> Tensor:
    for index in used:
        x = net[index](x).tanh()
    return x.square().mean()


def expected(used: Callable[[int], range] = lambda _: range(3)) -> list[Tensor | None]:
    """Gradients of the mean over both ranks' rows, on one process."""
    net = make()
    (sum(loss_of(net, rows(rank), used(rank)) for rank in range(2)) / 2).backward()  # type: ignore[union-attr]
    return [p.grad for p in net.parameters()]


def check(net: nn.ModuleList, wanted: list[Tensor | None]) -> None:
    for parameter, gradient in zip(net.parameters(), wanted, strict=True):
        if gradient is None:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("chunk_bytes", [1, 40, 2**20])
@pytest.mark.parametrize("lend", [True, False])
@ranks(2)
def test_gradients_are_the_mean(chunk_bytes: int, lend: bool) -> None:
    net = make()
    flat = FlatGradients(list(net.parameters()), chunk_bytes=chunk_bytes)
    for _ in range(2):
        net.zero_grad()
        if lend:
            flat.before_backward()
        loss_of(net, rows(dist.get_rank())).backward()
        check(net, expected())


@ranks(2)
def test_one_collective_for_all() -> None:
    net = make()
    flat = FlatGradients(list(net.parameters()))
    flat.before_backward()
    with count_collectives() as sent:
        loss_of(net, rows(dist.get_rank())).backward()
    assert sent.counts == {"all_reduce": 1}
    views = {p.grad.untyped_storage().data_ptr() for p in net.parameters() if p.grad is not None}
    assert len(views) == 1


@ranks(2)
def test_accumulation_reduces_once() -> None:
    net = make()
    flat = FlatGradients(list(net.parameters()))
    x = rows(dist.get_rank())
    with count_collectives() as sent:
        for half, context in ((x[:2], flat.paused()), (x[2:], None)):
            flat.before_backward()
            if context is None:
                (loss_of(net, half) / 2).backward()
            else:
                with context:
                    (loss_of(net, half) / 2).backward()
    assert sent["all_reduce"] == 1
    check(net, expected())


@ranks(2)
def test_a_parameter_no_rank_used_keeps_no_gradient() -> None:
    net = make()
    flat = FlatGradients(list(net.parameters()), chunk_bytes=1)
    flat.before_backward()
    loss_of(net, rows(dist.get_rank()), range(2)).backward()
    check(net, expected(lambda _: range(2)))


@ranks(2)
def test_a_parameter_one_rank_used_is_averaged_on_all() -> None:
    net = make()
    flat = FlatGradients(list(net.parameters()), chunk_bytes=1)
    flat.before_backward()
    loss_of(net, rows(dist.get_rank()), range(2 + dist.get_rank())).backward()
    check(net, expected(lambda rank: range(2 + rank)))


def gradient_seen_by_a_hook() -> list[float]:
    parameter = nn.Parameter(torch.ones(1))
    flat = FlatGradients([parameter])
    flat.before_backward()
    (parameter * (1.0 + dist.get_rank())).backward()
    assert parameter.grad is not None
    return parameter.grad.tolist()


def test_finished_when_backward_returns() -> None:
    assert run_ranks(2, gradient_seen_by_a_hook) == [[1.5], [1.5]]
