"""What FSDP gathers ahead, and how its traffic overlaps with compute where there are no streams."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_shard._compat import ReduceScatter, at_end_of_backward, fsdp_gather_async, reduce_scatter_single
from lightning_shard._compat.sharded import has_gradient_hooks
from lightning_shard.parallelize.pairs import is_pair, reduce_scatter
from lightning_shard.parallelize.units import Units


def gather_ahead(units: Units, depth: int, *, streams: bool) -> None:
    """Have every unit gather the next ``depth`` ones ahead, in forward and in backward.

    Args:
        units: sharded; those that hold nothing to gather are passed over.
        depth: units ahead; 0 gathers each when it is needed.
        streams: whether gathers run on streams of their own (an accelerator). FSDP then is one unit ahead by itself;
            on the host a gather blocks unless it is asked for asynchronously, and ahead.
    """
    if not streams and depth:
        assert isinstance(units.root, FSDPModule)
        fsdp_gather_async(units.root)
    for unit, in_forward, in_backward in prefetch_lists(units, depth, streams=streams):
        unit.set_modules_to_forward_prefetch(in_forward)
        unit.set_modules_to_backward_prefetch(in_backward)


def prefetch_lists(
    units: Units, depth: int, *, streams: bool
) -> Iterator[tuple[FSDPModule, list[FSDPModule], list[FSDPModule]]]:
    """Each unit that is sharded, what it gathers ahead in forward, and in backward; nothing where FSDP's own way does."""
    if depth == 1 and streams:
        return
    kinds = (units.blocks,) if streams else (units.embeddings, units.blocks, units.heads)
    order: list[FSDPModule] = [unit for kind in kinds for _, unit in kind if isinstance(unit, FSDPModule)]
    for index, unit in enumerate(order):
        # An empty list in backward means FSDP's own choice, one unit; a unit's own gather is never ahead.
        yield unit, order[index + 1 : index + 1 + depth], order[max(0, index - depth) : index][::-1] or [unit]
    if isinstance(units.root, FSDPModule) and not streams:
        yield units.root, order[:depth], order[::-1][:depth] or [units.root]


def has_streams(mesh: DeviceMesh) -> bool:
    """Whether collectives of ``mesh`` run beside compute by themselves, as on an accelerator."""
    return mesh.device_type != "cpu"


class HostReductions:
    """Reduce-scatters on the host: beside backward, one at a time, all in before backward returns; two ranks exchange.

    FSDP's own block there: it leaves the overlap to streams.

    Args:
        beside: False finishes each at once, where FSDP goes on with its result.
    """

    def __init__(self, *, beside: bool = True) -> None:
        self._beside = beside
        self._work: Any = None
        self._kept: tuple[Tensor, ...] = ()

    def install(self, root: nn.Module) -> None:
        """Let every unit below ``root`` reduce through this."""
        for module in root.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(_HostReduceScatter(self, module))

    def start(self, output: Tensor, source: Tensor, group: dist.ProcessGroup, op: Any, *, finish: bool) -> None:
        """Reduce ``source`` into ``output``, the rank's share of it; ``finish`` waits for the result."""
        self.wait()
        if is_pair(group, source.device.type) and op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) and source.numel():
            self._work = reduce_scatter(output, source, group, op)
        else:
            self._work = reduce_scatter_single(output, source, op=op, group=group, async_op=True)
        self._kept = (output, source)
        if finish or not self._beside:
            self.wait()
        else:
            at_end_of_backward(self.wait)

    def wait(self) -> None:
        """Until what was started has arrived."""
        if self._work is not None:
            self._work.wait()
        self._work, self._kept = None, ()


class _HostReduceScatter(ReduceScatter):
    """The reduce-scatter of one unit, in the form in which FSDP takes it."""

    def __init__(self, reductions: HostReductions, unit: nn.Module) -> None:
        self._reductions = reductions
        self._parameters = [p for p in unit.parameters() if isinstance(p, DTensor)]  # some may begin to train later

    @override
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    @override
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        # FSDP adds to a gradient that is there, calls a user's hooks, and divides a sum, as soon as this returns.
        finish = op != dist.ReduceOp.AVG or any(p.grad is not None or has_gradient_hooks(p) for p in self._parameters)
        self._reductions.start(output_tensor, input_tensor, group, op, finish=finish)
