"""Updates on the host: the optimizer's state waits and is read there, weights and gradients stay on the device.

For the time of an update the optimizer's groups hold stand-ins in host memory: copies of the weights, with copies of
their gradients. What the update makes of them is copied back, so the device's weights remain the one truth that
checkpoints, averages of weights and users read and write.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

HOST = torch.device("cpu")


class HostUpdate:
    """Runs optimizers over stand-ins in host memory."""

    def __init__(self) -> None:
        self._stand_ins: dict[nn.Parameter, nn.Parameter] = {}
        self._under_way: dict[Optimizer, dict[nn.Parameter, nn.Parameter]] = {}

    def begin(self, optimizer: Optimizer) -> None:
        """Gradients are final: from now until :meth:`end` the optimizer reads and writes host memory."""
        if optimizer in self._under_way:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for parameter in parameters:
            stand_in = self._stand_in(parameter)
            stand_in.data.copy_(parameter.detach(), non_blocking=True)
            stand_in.grad = _copy_to_host(parameter.grad, stand_in.grad)
        _wait_for_copies(parameters)
        self._swap(optimizer, {p: self._stand_ins[p] for p in parameters})

    def end(self, optimizer: Optimizer) -> None:
        """Bring the new weights to the device. Does nothing where no update began."""
        swapped = self._under_way.pop(optimizer, {})
        _rename(optimizer, {stand_in: parameter for parameter, stand_in in swapped.items()})
        with torch.no_grad():
            for parameter, stand_in in swapped.items():
                parameter.copy_(stand_in, non_blocking=True)

    @contextmanager
    def holding(self, optimizer: Optimizer) -> Iterator[None]:
        """State that is loaded meanwhile stays in host memory."""
        swapped = {p: self._stand_in(p) for group in optimizer.param_groups for p in group["params"]}
        _rename(optimizer, swapped)
        try:
            yield
        finally:
            _rename(optimizer, {stand_in: parameter for parameter, stand_in in swapped.items()})

    def _swap(self, optimizer: Optimizer, stand_ins: dict[nn.Parameter, nn.Parameter]) -> None:
        for parameter in stand_ins:
            state = optimizer.state.get(parameter)
            if state:  # of a layout before this one, perhaps
                optimizer.state[parameter] = on_host(state)
        self._under_way[optimizer] = stand_ins
        _rename(optimizer, stand_ins)

    def _stand_in(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter not in self._stand_ins:
            self._stand_ins[parameter] = nn.Parameter(_room_on_host(parameter.detach()))
        return self._stand_ins[parameter]

    def __deepcopy__(self, memo: Any) -> "HostUpdate":
        return HostUpdate()


def require_host_update(optimizers: Iterable[Optimizer]) -> None:
    """Raise ValueError for an optimizer that does not read its groups anew after its closure."""
    for optimizer in optimizers:
        if isinstance(optimizer, LBFGS) or hasattr(optimizer, "consolidate_state_dict"):
            raise ValueError(
                f"offload='optimizer' cannot run {type(optimizer).__name__}, which keeps a list of the parameters on the "
                "device. Use another optimizer, or offload='none'."
            )


def _rename(optimizer: Optimizer, names: dict[nn.Parameter, nn.Parameter]) -> None:
    """Put other parameters into the places of those, with the state of those."""
    for group in optimizer.param_groups:
        group["params"] = [names.get(p, p) for p in group["params"]]
    for before, after in names.items():
        if before in optimizer.state:
            optimizer.state[after] = optimizer.state.pop(before)


def _room_on_host(like: Tensor) -> Tensor:
    """Pinned where a device copies from it."""
    return torch.empty_like(like, device=HOST, pin_memory=like.device.type == "cuda")


def _copy_to_host(value: Tensor | None, into: Tensor | None) -> Tensor:
    assert value is not None
    into = _room_on_host(value.detach()) if into is None or into.dtype != value.dtype else into
    return into.copy_(value.detach(), non_blocking=True)


def on_host(state: Mapping[str, Any]) -> dict[str, Any]:
    """One parameter's state with all tensors in host memory."""
    return {key: value.to(HOST) if isinstance(value, Tensor) else value for key, value in state.items()}


def _wait_for_copies(parameters: list[nn.Parameter]) -> None:
    for device in {p.device for p in parameters}:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
