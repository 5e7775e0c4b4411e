"""The optimizer of a plain step, and its state before the step."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shard.plans import Offload
from lightning_shard.simulate.tracker import Tracker
from lightning_shard.specs import TrainSpec

CLASSES: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {}),
    "adam": (torch.optim.Adam, {}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "sgd": (torch.optim.SGD, {"lr": 1e-3}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "adafactor": (torch.optim.Adafactor, {}),
}
"""Name in :class:`TrainSpec` to torch's class and its arguments."""


def make_optimizer(parameters: Iterable[nn.Parameter], train: TrainSpec) -> Optimizer:
    """The torch optimizer of that name over what trains.

    Raises:
        ValueError: for an optimizer that torch does not have.
    """
    name = train.optimizer.strip().lower().replace("_", "-")
    if name not in CLASSES:
        raise ValueError(
            f"optimizer={train.optimizer!r} cannot be simulated: torch has no such class. Use one of "
            f"{', '.join(CLASSES)}, or give a LightningModule whose configure_optimizers builds it."
        )
    make, arguments = CLASSES[name]
    how: dict[str, Any] = {"foreach": train.optimizer_implementation == "foreach"}
    if train.optimizer_implementation == "fused":
        how = {"fused": True}
    return make([p for p in parameters if p.requires_grad], **arguments, **how)


def warm_up(optimizers: Iterable[Optimizer], tracker: Tracker, *, keep_gradients: bool, offload: Offload) -> None:
    """Make the optimizers' state, as a first step would have, and with it the gradients that step left.

    Lightning clears gradients between forward and backward, so a forward finds those of the step before.
    """
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    tracker.mark()
    for optimizer in optimizers:
        optimizer.step()
        _adopt_state(optimizer, tracker, offload)
    tracker.mark()
    for parameter in parameters:
        if keep_gradients and parameter.grad is not None and not (offload == "all" and isinstance(parameter, DTensor)):
            tracker.adopt_gradient(parameter.grad)
        else:
            parameter.grad = None
    tracker.mark()


def _adopt_state(optimizer: Optimizer, tracker: Tracker, offload: Offload) -> None:
    fused = any(group.get("fused") for group in optimizer.param_groups)
    for parameter, state in optimizer.state.items():
        on_host = offload == "optimizer" or (offload == "all" and isinstance(parameter, DTensor))
        for value in state.values():
            if not isinstance(value, Tensor):
                continue
            if not on_host and (value.dim() or fused):
                tracker.adopt(value, "optimizer_state")
            else:  # a step counter lives on the host unless the fused kernel reads it
                tracker.ignore(value)
