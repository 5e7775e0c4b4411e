"""Optimizers follow parameters that a new layout replaced."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_shard.parallelize.unshard import cut_like, whole


def lay_out_under(
    optimizers: Sequence[Optimizer],
    module: nn.Module,
    lay_out: Callable[[], DeviceMesh | None],
    averages: Sequence[nn.Module] = (),
) -> None:
    """Change the layout; afterwards the optimizers hold the parameters of the same names.

    Groups, their options, schedulers and state stay; state that has a parameter's shape is split as the parameter is.

    Args:
        optimizers: over parameters of ``module``.
        module: at rest: its parameters are the shards, where it is sharded.
        lay_out: changes the layout; returns the mesh over which the shards of before can be gathered.
        averages: modules of the same make, whose parameters are split as those of ``module``.
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
    for average in averages:
        _split_alike(average, module, mesh)


def _split_alike(average: nn.Module, module: nn.Module, mesh: DeviceMesh | None) -> None:
    there = dict(average.named_modules())
    made: dict[nn.Parameter, nn.Parameter] = {}  # a tie stays one
    for path, part in module.named_modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                if parameter not in made:
                    value = _follow(there[path]._parameters[key].detach(), parameter, mesh)  # type: ignore[union-attr]
                    made[parameter] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                there[path]._parameters[key] = made[parameter]


@torch.no_grad()
def _follow(value: Any, parameter: nn.Parameter, mesh: DeviceMesh | None) -> Any:
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return cut_like(whole(value, mesh), parameter)
