"""What an optimizer's update changes, copied to host memory before it so that it can be put back."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class BeforeUpdate:
    """Weights and optimizer state as they were: this rank's parts.

    Args:
        optimizer: about to update.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._weights = [(parameter, _to_host(parameter)) for parameter in _parameters(optimizer)]
        self._state = {parameter: _copied(state) for parameter, state in optimizer.state.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back where it was, in place; state that is new is dropped."""
        for parameter, before in self._weights:
            _local(parameter).copy_(before)
        self._optimizer.state.clear()
        for parameter, values in self._state.items():
            for value, before in values.values():
                if isinstance(value, Tensor):
                    _local(value).copy_(before)
            self._optimizer.state[parameter] = {key: value for key, (value, _) in values.items()}


def changed_bytes(optimizer: Optimizer) -> int:
    """Host memory that a :class:`BeforeUpdate` takes on this rank."""
    state = (value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor))
    return sum(_local(tensor).nbytes for tensor in (*_parameters(optimizer), *state))


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _copied(state: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Each value with its copy."""
    return {key: (value, _to_host(value) if isinstance(value, Tensor) else value) for key, value in state.items()}


def _to_host(tensor: Tensor) -> Tensor:
    return _local(tensor).to("cpu", copy=True)


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
