"""One chunk instead of one for every rank, so that a simulated world of a thousand ranks costs no more than one of eight."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_shard._compat import fsdp_chunking
from lightning_shard.simulate.patches import patched

MANY = 16
"""From this many chunks on one stands for all."""


@contextmanager
def quick_chunks() -> Iterator[None]:
    """Inside, FSDP2 makes those chunks that it looks at; where it joins all of them, one stands for each."""
    (parameters, cut), (transfers, name) = fsdp_chunking()
    with patched(parameters, cut, _Chunks), patched(transfers, name, _Torch()):
        yield


class _Chunks:
    """What FSDP2 makes of ``torch.chunk``, empty chunks at the end included; each is made when it is asked for."""

    def __init__(self, tensor: Tensor, num_chunks: int, dim: int) -> None:
        self._tensor = tensor
        self._dim = dim
        self._size = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._size
        length = min(self._size, self._tensor.size(self._dim) - start)
        if length <= 0:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, length)


class _Torch:
    """torch, with quick ways to cut a tensor evenly and to join the pieces; for tensors without values."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def chunk(tensor: Tensor, num_chunks: int, dim: int = 0) -> Any:
        size, rest = divmod(tensor.size(dim), num_chunks)
        if num_chunks < MANY or rest:
            return torch.chunk(tensor, num_chunks, dim)
        return [tensor.narrow(dim, 0, size)] * num_chunks

    @staticmethod
    def cat(tensors: list[Tensor], dim: int = 0, out: Tensor | None = None) -> Tensor:
        first = tensors[0]
        if len(tensors) < MANY or any(tensor is not first for tensor in tensors):
            return torch.cat(tensors, dim) if out is None else torch.cat(tensors, dim, out=out)
        if out is not None:
            return out
        shape = list(first.shape)
        shape[dim] *= len(tensors)
        return first.new_empty(shape)
