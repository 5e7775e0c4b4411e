"""Optimizers follow parameters that a new layout replaced."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


@contextmanager
def follow_parameters(module: nn.Module, optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Around a change of layout: afterwards the optimizers hold the parameters of the same names.

    Groups, their options, schedulers and state stay; state that has a parameter's shape is split as the parameter is.
    The parameters before the change must be whole.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    yield
    now = dict(module.named_parameters())
    for optimizer in optimizers:
        state = {now[names[old]]: values for old, values in optimizer.state.items()}
        for group in optimizer.param_groups:
            group["params"] = [now[names[old]] for old in group["params"]]
        optimizer.state.clear()
        for parameter, values in state.items():
            optimizer.state[parameter] = {key: _follow(value, parameter) for key, value in values.items()}


def _follow(value: Any, parameter: nn.Parameter) -> Any:
    same = isinstance(value, Tensor) and value.shape == parameter.shape
    if not same or not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
