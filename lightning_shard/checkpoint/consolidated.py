"""Whole state in one file, keyed by parameter name, that any layout writes and any layout reads.

Lightning keys optimizer state by the position of a parameter, which breaks as soon as the layout or the set
of frozen parameters changes. Names survive both.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer


def gather_module_state(module: nn.Module) -> dict[str, Any]:
    """The whole state dict of a sharded module in host memory, on rank 0; other ranks get an empty one.

    A collective: every rank must call it.
    """
    return get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))


def load_module_state(module: nn.Module, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load a whole state dict, which every rank holds, into a sharded module.

    Raises:
        RuntimeError: with ``strict``, naming missing and unexpected keys.
    """
    set_model_state_dict(module, dict(state), options=StateDictOptions(full_state_dict=True, strict=strict))


def gather_optimizer_state(module: nn.Module, optimizer: Optimizer, *, keep: bool) -> dict[str, Any]:
    """Optimizer state with parameter names for keys and whole tensors in host memory.

    Args:
        module: names the parameters.
        optimizer: over parameters of ``module``, plain or sharded.
        keep: whether this rank wants the result (the gathers are collective all the same).
    """
    names = _names(module)
    state: dict[str, Any] = {}
    groups = []
    for group in optimizer.param_groups:
        groups.append({key: value for key, value in group.items() if key != "params"})
        groups[-1]["params"] = [names[p] for p in group["params"]]
        for parameter in group["params"]:
            values = {key: _whole(value, keep) for key, value in optimizer.state.get(parameter, {}).items()}
            if keep and values:
                state[names[parameter]] = values
    return {"state": state, "param_groups": groups} if keep else {}


def load_optimizer_state(module: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Load what :func:`gather_optimizer_state` wrote, or torch's own form, into any layout.

    Raises:
        RuntimeError: when a parameter that trains has no state in the checkpoint, or groups differ.
    """
    ours = _names(module)
    current = optimizer.state_dict()
    if len(saved["param_groups"]) != len(current["param_groups"]):
        raise RuntimeError(
            f"The checkpoint's optimizer has {len(saved['param_groups'])} parameter groups, this run's "
            f"{type(optimizer).__name__} has {len(current['param_groups'])}. Build the same groups in configure_optimizers."
        )
    state: dict[int, Any] = {}
    for saved_group, group, now in zip(
        saved["param_groups"], optimizer.param_groups, current["param_groups"], strict=True
    ):
        for parameter, key, index in _matched(saved_group["params"], group["params"], now["params"], ours):
            if key in saved["state"]:
                state[index] = {k: _like(v, parameter) for k, v in saved["state"][key].items()}
        now.update({k: v for k, v in saved_group.items() if k != "params"})
    optimizer.load_state_dict({"state": state, "param_groups": current["param_groups"]})


def _matched(
    saved: list[Any], parameters: list[nn.Parameter], indices: list[int], names: Mapping[nn.Parameter, str]
) -> Iterator[tuple[nn.Parameter, Any, int]]:
    by_name = bool(saved) and isinstance(saved[0], str)
    if by_name:
        missing = sorted({names[p] for p in parameters} - set(saved))
        if missing:
            raise RuntimeError(
                f"The checkpoint holds no optimizer state for {len(missing)} parameters that train now, the first is "
                f"{missing[0]!r}. Resume with the same trainable parameters, or load the weights alone."
            )
        yield from ((p, names[p], index) for p, index in zip(parameters, indices, strict=True))
        return
    if len(saved) != len(parameters):
        raise RuntimeError(
            f"The checkpoint's parameter group holds {len(saved)} parameters, this run's {len(parameters)}. "
            "Build the same groups in configure_optimizers."
        )
    yield from zip(parameters, saved, indices, strict=True)


def _names(module: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in module.named_parameters()}


def _whole(value: Any, keep: bool) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(value, Tensor):
        return value
    return value.detach().cpu() if keep else None


def _like(value: Any, parameter: nn.Parameter) -> Any:
    """A saved value in its parameter's layout: moments are split as the parameter is, scalars are not."""
    if isinstance(parameter, DTensor) and isinstance(value, Tensor) and value.shape == parameter.shape:
        whole = value.to(parameter.device_mesh.device_type)
        return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
    return value.clone() if isinstance(value, torch.Tensor) else value
