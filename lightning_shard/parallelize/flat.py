"""Replicated trainables whose gradients are views of one buffer: reduced without copies, overlapped with backward.

A parameter stays an ordinary named parameter; only its ``.grad`` is a view. The buffer is cut into chunks in
the order in which backward fills it; a chunk is sent as soon as it is full, and all are in before backward
returns, so hooks and clipping see finished gradients.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard._compat import at_end_of_backward

CHUNK_BYTES = 4 * 2**20
"""Small enough that the first chunks travel while backward still runs, large enough to fill a link."""


class FlatGradients:
    """Averages the gradients of replicated parameters over one process group.

    Args:
        parameters: replicated on every rank of the group, in the order of registration.
        group: who averages; None is everyone.
        chunk_bytes: gradients per all-reduce.
    """

    def __init__(
        self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None = None, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self._group = group
        self.sync = True
        """Off while accumulating: gradients add up locally."""
        self._chunks: list[_Chunk] = []
        self._of: dict[nn.Parameter, _Chunk] = {}
        self._running = False
        self._num_sent = 0
        for parameters_of_type in _by_type(parameters[::-1]):
            for part in _cut(parameters_of_type, chunk_bytes):
                chunk = _Chunk(part)
                self._chunks.append(chunk)
                self._of.update(dict.fromkeys(part, chunk))
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._ready)  # type: ignore[no-untyped-call]

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._of

    @property
    def num_bytes(self) -> int:
        """Bytes of gradients, which is what one reduction moves."""
        return sum(chunk.buffer.numel() * chunk.buffer.element_size() for chunk in self._chunks)

    def before_backward(self) -> None:
        """Lend every parameter without a gradient its view, so that backward fills the buffer directly."""
        for chunk in self._chunks:
            chunk.lend()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Accumulate without reducing."""
        self.sync = False
        try:
            yield
        finally:
            self.sync = True

    def _ready(self, parameter: nn.Parameter) -> None:
        chunk = self._of[parameter]
        chunk.fill(parameter)
        if not self._running:
            self._running = True
            at_end_of_backward(self._finish)
        if self.sync:
            self._send(only_full=True)

    def _send(self, *, only_full: bool) -> None:
        """Send chunks in one fixed order: ranks may fill them in different ones."""
        while self._num_sent < len(self._chunks) and (not only_full or self._chunks[self._num_sent].full):
            self._chunks[self._num_sent].send(self._group)
            self._num_sent += 1

    def _finish(self) -> None:
        """Send what backward left incomplete (parameters it did not use), and wait for everything."""
        self._running = False
        if self.sync:
            self._send(only_full=False)
        self._num_sent = 0
        for chunk in self._chunks:
            chunk.settle(synced=self.sync)


class _Chunk:
    """A run of parameters of one type, their gradients' buffer, and a flag for each: was it used anywhere."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        total = sum(p.numel() for p in parameters)
        first = parameters[0]
        # The flags travel in the same reduction: a gradient that no rank made must stay None everywhere.
        self.buffer = torch.zeros(total + len(parameters), dtype=first.dtype, device=first.device)
        self._flags = self.buffer[total:]
        self._views: dict[nn.Parameter, Tensor] = {}
        self._lent: set[nn.Parameter] = set()
        self._filled: set[nn.Parameter] = set()
        self._work: Any = None
        offset = 0
        for parameter in parameters:
            self._views[parameter] = self.buffer[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    @property
    def full(self) -> bool:
        return len(self._filled) == len(self._views)

    def lend(self) -> None:
        empty = [p for p in self._views if p.grad is None]
        if len(empty) == len(self._views):
            self.buffer.zero_()
        for parameter in empty:
            view = self._views[parameter]
            if len(empty) != len(self._views):
                view.zero_()
            parameter.grad = view
            self._lent.add(parameter)

    def fill(self, parameter: nn.Parameter) -> None:
        """Note a gradient; one that autograd put elsewhere (a bare ``loss.backward()``) moves into the buffer."""
        view = self._views[parameter]
        if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
            view.copy_(parameter.grad)
            parameter.grad = view
        self._lent.discard(parameter)
        self._filled.add(parameter)

    def send(self, group: dist.ProcessGroup | None) -> None:
        if self._lent:
            for parameter, flag in zip(self._views, self._flags, strict=True):
                flag.fill_(0.0 if parameter in self._lent else 1.0)
        else:
            self._flags.fill_(1.0)
        self._work = dist.all_reduce(self.buffer, op=dist.ReduceOp.AVG, group=group, async_op=True)

    def settle(self, *, synced: bool) -> None:
        if self._work is not None:
            self._work.wait()
        self._work = None
        self._filled.clear()
        if synced and self._lent:
            used = dict(zip(self._views, (self._flags > 0).tolist(), strict=True))
            for parameter in self._lent:
                if not used[parameter]:
                    parameter.grad = None
            self._lent.clear()


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
