"""All-gathers and reduce-scatters of two ranks on the host, as one exchange in both directions at once."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_shard._compat import AllGather, all_gather_single
from lightning_shard._compat.groups import GATHER_TAG, REDUCE_TAG


def is_pair(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether two ranks talk over gloo in ``group``."""
    return device_type == "cpu" and group.size() == 2 and dist.get_backend(group) == "gloo"


def gather_in_pairs(root: nn.Module) -> None:
    """Let every unit in ``root`` gather by :func:`gather` where its group is a pair."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_PairGather())


def gather(output: Tensor, source: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Gather two ranks' ``source`` into ``output``, which is twice its size; wait for what is returned.

    gloo's own all-gather sends its two halves one after the other and by turns, and uses 60 to 70 % of a network that
    carries both directions at once. A message starts when its receiver has said that it is ready, over the connection
    that carries the data, so each rank says so before it sends: said after, it would wait behind the data.
    """
    mine, others = _halves(output, group)
    if mine.data_ptr() != source.data_ptr():
        mine.copy_(source)
    return _Both(_exchange(mine, others, group, GATHER_TAG))


def reduce_scatter(output: Tensor, source: Tensor, group: dist.ProcessGroup, op: Any) -> dist.Work:
    """Sum or average two ranks' ``source`` into ``output``, the rank's half of it; wait for what is returned.

    gloo's own runs an all-reduce: twice the bytes.

    Raises:
        ValueError: for another operation.
    """
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise ValueError(f"A pair reduces by SUM or AVG, not by {op}.")
    mine, others = _halves(source, group)
    parts = _exchange(others, output, group, REDUCE_TAG)
    return _Both(parts, lambda: _add(output, mine, halved=op == dist.ReduceOp.AVG))


def _add(output: Tensor, mine: Tensor, *, halved: bool) -> None:
    output.add_(mine)
    if halved:
        output.div_(2)


def _halves(whole: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """This rank's, and the other's."""
    first, second = whole.chunk(2)
    return (second, first) if dist.get_rank(group) else (first, second)


def _exchange(sent: Tensor, received: Tensor, group: dist.ProcessGroup, tag: int) -> list[dist.Work]:
    other = 1 - dist.get_rank(group)
    arrives = dist.irecv(received, group=group, group_src=other, tag=tag)
    leaves = dist.isend(sent, group=group, group_dst=other, tag=tag)
    return [work for work in (arrives, leaves) if work is not None]


class _Both(dist.Work):
    """Done when all of its parts are, and what is to be done then."""

    def __init__(self, parts: Sequence[dist.Work], then: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._parts, self._then = list(parts), then

    @override
    def wait(self, *arguments: Any, **options: Any) -> bool:
        while self._parts:  # gloo's wait for the next message when they are asked again
            self._parts.pop(0).wait(*arguments, **options)
        then, self._then = self._then, None
        if then is not None:
            then()
        return True


class _PairGather(AllGather):
    """The gathers of one unit, in the form in which FSDP takes them."""

    @override
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    @override
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        if not is_pair(group, "cpu") or not input_tensor.numel():  # forward may leave it gathered in part
            return all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)  # type: ignore[no-any-return]
        both = gather(output_tensor, input_tensor, group)
        if async_op:
            return both
        both.wait()
        return None
