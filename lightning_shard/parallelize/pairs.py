"""All-gathers of two ranks on the host, as one exchange in both directions at once."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_shard._compat import AllGather, all_gather_single

PAIR_TAG = 0x9A12
"""Marks the messages of :func:`gather`, so that whoever counts collectives counts one all-gather."""


def is_pair(group: dist.ProcessGroup, device_type: str) -> bool:
    """Whether two ranks talk over gloo in ``group``."""
    return device_type == "cpu" and group.size() == 2 and dist.get_backend(group) == "gloo"


def gather_in_pairs(root: nn.Module, mesh: DeviceMesh) -> None:
    """Let every unit in ``root`` gather by :func:`gather`, where ``dp_shard`` is a pair."""
    if not is_pair(mesh["dp_shard"].get_group(), mesh.device_type):
        return
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_PairGather())


def gather(output: Tensor, source: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Gather two ranks' ``source`` into ``output``, which is twice its size; wait for what is returned.

    gloo's own all-gather sends its two halves one after the other and by turns, and uses 60 to 70 % of a network that
    carries both directions at once. A message starts when its receiver has said that it is ready, over the connection
    that carries the data, so each rank says so before it sends: said after, it would wait behind the data.
    """
    rank = dist.get_rank(group)
    mine, others = (output.chunk(2)[each] for each in (rank, 1 - rank))
    if mine.data_ptr() != source.data_ptr():
        mine.copy_(source)
    arrives = dist.irecv(others, group=group, group_src=1 - rank, tag=PAIR_TAG)
    leaves = dist.isend(mine, group=group, group_dst=1 - rank, tag=PAIR_TAG)
    return _Both([work for work in (arrives, leaves) if work is not None])


class _Both(dist.Work):
    """Done when all of its parts are."""

    def __init__(self, parts: Sequence[dist.Work]) -> None:
        super().__init__()
        self._parts = parts

    @override
    def wait(self, *arguments: Any, **options: Any) -> bool:
        for part in self._parts:
            part.wait(*arguments, **options)
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
            work: Any = all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
            return None if work is None else work
        both = gather(output_tensor, input_tensor, group)
        if async_op:
            return both
        both.wait()
        return None
