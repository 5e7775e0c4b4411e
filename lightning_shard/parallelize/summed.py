"""What travels between ranks that split a layer, as operations that autograd knows."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_shard._compat import all_gather_single


def sum_gradient(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The identity, whose gradient is summed over the group."""
    result: Tensor = _SumGradient.apply(value, group)  # type: ignore[no-untyped-call]
    return result


def sum_over(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the group; every rank's gradient is that of the sum."""
    result: Tensor = _Sum.apply(value, group)  # type: ignore[no-untyped-call]
    return result


def join(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The last dims of all ranks side by side, (..., n) to (..., ranks x n); every rank's gradient is that of the whole."""
    result: Tensor = _Join.apply(value, group)  # type: ignore[no-untyped-call]
    return result


@torch.no_grad()
def stack(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The values of all ranks in their order, (...) to (ranks, ...); autograd does not know it."""
    values = value.new_empty(dist.get_world_size(group), *value.shape)
    all_gather_single(values.view(-1), value.contiguous().view(-1), group=group)
    return values


class _SumGradient(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = value.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _Join(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return stack(value, group).movedim(0, -2).flatten(-2)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        parts = gradient.chunk(dist.get_world_size(ctx.group), dim=-1)
        return parts[dist.get_rank(ctx.group)].contiguous(), None
