"""Answers to questions about values that fake tensors do not have; every answer is counted."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_shard._compat import is_fake
from lightning_shard.simulate import shapes

_ATEN = torch.ops.aten


class Guesses:
    """Runs operators; those whose result depends on data get an answer instead.

    A number that is asked for is True or 1. A selection by mask selects everything: the most it can.
    """

    def __init__(self) -> None:
        self.count = 0

    def run(self, func: Any, args: Any, kwargs: Any, *, counted: bool = True) -> Any:
        """The result of ``func(*args, **kwargs)``."""
        answer = _ANSWERS.get(func)
        if answer is not None and any(map(is_fake, args)):
            self.count += counted
            return answer(*args)
        if func in _BY_INDEX and any(map(_is_mask, args[1])):
            self.count += counted
            args = (args[0], _without_masks(args[1]), *args[2:])
        return shapes.run(func, args, kwargs)


def _one(number: Tensor) -> bool | int | float:
    if number.dtype is torch.bool:
        return True
    return 1.0 if number.dtype.is_floating_point else 1


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) and is_fake(index)


def _all_indices(mask: Tensor) -> Tensor:
    return mask.new_empty((mask.numel(), mask.dim()), dtype=torch.int64)


def _everything(values: Tensor, mask: Tensor) -> Tensor:
    return values.new_empty(torch.broadcast_tensors(values, mask)[0].numel())  # type: ignore[no-untyped-call]


def _without_masks(indices: Any) -> list[Any]:
    """Masks as the index tensors that eager mode turns them into, one for each of their dimensions."""
    result: list[Any] = []
    for index in indices:
        if _is_mask(index):
            result += [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.dim())]
        else:
            result.append(index)
    return result


_ANSWERS: dict[Any, Callable[..., Any]] = {
    _ATEN._local_scalar_dense.default: _one,
    _ATEN.nonzero.default: _all_indices,
    _ATEN.masked_select.default: _everything,
}
_BY_INDEX = (
    _ATEN.index.Tensor,
    _ATEN.index_put.default,
    _ATEN.index_put_.default,
    _ATEN._index_put_impl_.default,
    _ATEN._unsafe_index.Tensor,
)
