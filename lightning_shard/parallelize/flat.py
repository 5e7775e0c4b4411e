"""Replicated trainables whose gradients are views of one buffer: reduced without copies, overlapped with backward.

A parameter stays an ordinary named parameter; only its ``.grad`` is a view. The buffer is cut into chunks in
the order in which backward fills it; a chunk is sent as soon as it is full, and all are in before backward
returns, so hooks and clipping see finished gradients.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard._compat import at_end_of_backward

CHUNK_BYTES = 4 * 2**20
"""Small enough that the first chunks travel while backward still runs, large enough to fill a link."""


class FlatGradients:
    """Averages the gradients of replicated parameters over one process group.

    A gradient that no rank made stays None on all of them; one that some ranks made is averaged with zeros, as
    on one device that saw all the data.

    Args:
        parameters: replicated on every rank of the group, in the order of registration. Those that do not train
            join when they begin to.
        group: who averages; None is everyone.
        chunk_bytes: gradients per all-reduce.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], group: dist.ProcessGroup | None = None, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._group = group
        self._chunk_bytes = chunk_bytes
        self.wire_dtype: torch.dtype | None = None
        """The type in which gradients travel, where it is not their own."""
        self.sync = True
        """Off while accumulating: gradients add up locally."""
        self._parameters = list(parameters)
        self._handles: list[Any] = []
        self._running = False
        self._num_sent = 0
        self._build()

    def _build(self) -> None:
        self.close()
        trained = [p for p in self._parameters if p.requires_grad]
        self._frozen = [p for p in self._parameters if not p.requires_grad]
        self._chunks: list[_Chunk] = []
        self._of: dict[nn.Parameter, _Chunk] = {}
        for parameters_of_type in _by_type(trained[::-1]):
            for part in _cut(parameters_of_type, self._chunk_bytes):
                chunk = _Chunk(part)
                self._chunks.append(chunk)
                self._of.update(dict.fromkeys(part, chunk))
        self._handles = [p.register_post_accumulate_grad_hook(self._ready) for p in trained]  # type: ignore[no-untyped-call]

    def resize(self, chunk_bytes: int) -> None:
        """From the next backward on, reduce so many bytes at a time. The gradients that are there stay."""
        self._chunk_bytes = chunk_bytes
        self._build()

    def close(self) -> None:
        """Take the hooks off the parameters: from now on their gradients stay local."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __deepcopy__(self, memo: Any) -> None:
        """A copy of the module (an average of weights, say) is not what trains: nothing reduces its gradients."""
        return

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._of

    @property
    def buffers(self) -> list[Tensor]:
        """What the gradients are views of."""
        return [chunk.buffer for chunk in self._chunks]

    @property
    def num_bytes(self) -> int:
        """Bytes of gradients, which is what one reduction moves."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.buffers)

    def before_backward(self, loss: Tensor | None = None) -> None:
        """Lend every parameter without a gradient its view, so that backward fills the buffer directly.

        Args:
            loss: what backward starts from. Where it is known, backward has ended only when that of the loss has: a
                reentrant checkpoint runs others inside it.
        """
        if any(p.requires_grad for p in self._frozen):
            self._build()
        for chunk in self._chunks:
            chunk.lend()
        if loss is not None and loss.requires_grad:
            loss.register_hook(self._begin)  # type: ignore[no-untyped-call]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Accumulate without reducing."""
        self.sync = False
        try:
            yield
        finally:
            self.sync = True

    def reset(self) -> None:
        """Forget a backward that was broken off by an error."""
        self._running, self._num_sent = False, 0
        for chunk in self._chunks:
            with suppress(RuntimeError):  # a lost peer fails its collectives: that error is on its way already
                chunk.settle()

    def _begin(self, _: Any = None) -> None:
        if not self._running:
            self._running = True
            at_end_of_backward(self._finish)

    def _ready(self, parameter: nn.Parameter) -> None:
        self._begin()
        chunk = self._of[parameter]
        if chunk.fill(parameter) and self.sync:
            self._send(only_full=True)

    def _send(self, *, only_full: bool) -> None:
        """Send chunks in one fixed order: ranks may fill them in different ones."""
        while self._num_sent < len(self._chunks) and (not only_full or self._chunks[self._num_sent].full):
            self._chunks[self._num_sent].send(self._group, self.wire_dtype)
            self._num_sent += 1

    def _finish(self) -> None:
        """Send what backward left incomplete (parameters it did not use), and wait for everything."""
        self._running = False
        if self.sync:
            self._send(only_full=False)
        self._num_sent = 0
        for chunk in self._chunks:
            chunk.settle()


class _Chunk:
    """A run of parameters of one type and the buffer of their gradients.

    Whether any rank made a gradient travels with it, for nothing: where a rank made none it sends -0.0, and a sum
    is -0.0 only if every term is. A gradient that was made is never -0.0, since it was added to +0.0.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        first = parameters[0]
        # Not zeroed: set-up would touch memory that the first backward's lending zeroes anyway.
        self.buffer = torch.empty(sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device)
        self._views: dict[nn.Parameter, Tensor] = {}
        self._lent: set[nn.Parameter] = set()
        """Hold their view, which no backward has written to since the gradients were cleared."""
        self._missing: set[nn.Parameter] = set()
        """Have not come in this backward."""
        self._unused: list[nn.Parameter] = []
        """What this rank has no gradient of in the reduction under way."""
        self._wire = self.buffer
        """What is sent: the buffer, or a narrower copy of it."""
        self._work: Any = None
        offset = 0
        for parameter in parameters:
            self._views[parameter] = self.buffer[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        self._await()

    @property
    def full(self) -> bool:
        return not self._missing

    def lend(self) -> None:
        empty = [p for p in self._views if p.grad is None]
        if len(empty) == len(self._views):
            self.buffer.zero_()
        elif empty:
            torch._foreach_zero_([self._views[p] for p in empty])
        for parameter in empty:
            if parameter.requires_grad:
                parameter.grad = self._views[parameter]
                self._lent.add(parameter)
        self._await()

    def _await(self) -> None:
        """Expect what trains; what is switched off for a while (another optimizer's turn) does not come."""
        self._missing = {p for p in self._views if p.requires_grad}

    def fill(self, parameter: nn.Parameter) -> bool:
        """Note a gradient; True once the chunk is full.

        One that autograd put elsewhere (a bare ``loss.backward()``) moves into the buffer.
        """
        if self._work is not None:
            raise RuntimeError(
                f"A parameter of shape {tuple(parameter.shape)} got a second gradient in one backward, after the first had "
                "been sent: it is used in several reentrant checkpoints. Use checkpoint(..., use_reentrant=False)."
            )
        view = self._views[parameter]
        if parameter.grad is not view and parameter.grad is not None:
            torch.add(parameter.grad, 0.0, out=view)
            parameter.grad = view
        self._lent.discard(parameter)
        self._missing.discard(parameter)
        return not self._missing

    def send(self, group: dist.ProcessGroup | None, dtype: torch.dtype | None) -> None:
        self._unused = [p for p in self._views if p.grad is None or p in self._lent]
        if dtype is None:
            self._wire = self.buffer
        else:  # divided first: a sum of halves may overflow. Adding +0.0 undoes a -0.0 that rounding made.
            self._wire = self.buffer.div(dist.get_world_size(group)).to(dtype).add_(0.0)
        for parameter in self._unused:
            self._part(parameter).fill_(-0.0)
        operation = dist.ReduceOp.AVG if dtype is None else dist.ReduceOp.SUM
        self._work = dist.all_reduce(self._wire, op=operation, group=group, async_op=True)

    def _part(self, parameter: nn.Parameter) -> Tensor:
        """The part of what is sent that is this parameter's."""
        view = self._views[parameter]
        first = view.storage_offset()
        return self._wire[first : first + view.numel()]

    def settle(self) -> None:
        if self._work is not None:
            self._work.wait()
            nobody = {p: bool(((part := self._part(p)) == 0).logical_and_(part.signbit()).all()) for p in self._unused}
            if self._wire is not self.buffer:
                self.buffer.copy_(self._wire)
            for parameter in self._unused:
                parameter.grad = None if nobody[parameter] else self._views[parameter]
            self._lent.clear()
        self._work, self._unused, self._wire = None, [], self.buffer
        self._await()


def _by_type(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    groups: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return list(groups.values())


def _cut(parameters: list[nn.Parameter], chunk_bytes: int) -> Iterator[list[nn.Parameter]]:
    part: list[nn.Parameter] = []
    size = 0
    for parameter in parameters:
        part.append(parameter)
        size += parameter.numel() * parameter.element_size()
        if size >= chunk_bytes:
            yield part
            part, size = [], 0
    if part:
        yield part
