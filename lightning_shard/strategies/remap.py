"""Optimizers follow parameters that a new layout replaced."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_shard.parallelize.unshard import cut_like, whole


def lay_out_under(optimizers: Sequence[Optimizer], module: nn.Module, lay_out: Callable[[], DeviceMesh | None]) -> None:
    """Change the layout; afterwards the optimizers hold the parameters of the same names.

    Groups, their options, schedulers and state stay; state that has a parameter's shape is split as the parameter is.

    Args:
        optimizers: over parameters of ``module``.
        module: at rest: its parameters are the shards, where it is sharded.
        lay_out: changes the layout; returns the mesh over which the shards of before can be gathered.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
    mesh = lay_out()
    now = dict(module.named_parameters())
    for optimizer in optimizers:
        state = [(now[names[old]], values) for old, values in optimizer.state.items()]
        for group in optimizer.param_groups:
            group["params"] = [now[names[old]] for old in group["params"]]
        optimizer.state.clear()
        for parameter, values in state:
            optimizer.state[parameter] = {key: _follow(value, parameter, mesh) for key, value in values.items()}


@torch.no_grad()
def _follow(value: Any, parameter: nn.Parameter, mesh: DeviceMesh | None) -> Any:
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return cut_like(whole(value, mesh), parameter)
