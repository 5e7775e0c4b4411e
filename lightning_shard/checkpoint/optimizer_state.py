"""Optimizer state keyed by parameter name, which survives another layout and another set of frozen parameters.

Lightning keys it by the position of a parameter, which breaks as soon as either changes.
"""

import logging
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard.checkpoint.module_state import empty_in_layout, place
from lightning_shard.checkpoint.names import parameter_names, plain_name
from lightning_shard.checkpoint.storage import StoredTensors
from lightning_shard.parallelize.host_update import HOST, HostUpdate, on_host

log = logging.getLogger(__name__)


def named_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Optimizer state by parameter name, with live values (plain tensors or DTensors).

    Args:
        module: names the parameters.
        optimizer: over parameters of ``module``, plain or sharded.
    """
    names = parameter_names(module)
    state: dict[str, dict[str, Any]] = {}
    groups = []
    for group in optimizer.param_groups:
        groups.append({key: value for key, value in group.items() if key != "params"})
        groups[-1]["params"] = [names[p] for p in group["params"]]
        for parameter in group["params"]:
            values = optimizer.state.get(parameter, {})
            if values:
                state[names[parameter]] = dict(values)
    return {"state": state, "param_groups": groups}


def load_named_state(
    module: nn.Module, optimizer: Optimizer, saved: Mapping[str, Any], host: HostUpdate | None = None
) -> None:
    """Load what :func:`named_state` gave, or torch's own form by position, into any layout.

    A parameter that did not train when the state was saved starts without one; the state of one that no longer
    trains is dropped. A group takes its hyper-parameters from the saved group that holds most of its parameters.

    Args:
        module: names the parameters.
        optimizer: over parameters of ``module``.
        saved: ``state`` and ``param_groups``; tensors are whole, or have their parameter's layout.
        host: holds the state in host memory, where the plan says so.

    Raises:
        RuntimeError: when a state by position does not fit the groups there are.
    """
    names = parameter_names(module)
    current = optimizer.state_dict()
    by_name = all(isinstance(p, str) for group in saved["param_groups"] for p in group["params"])
    if not by_name:
        saved = _by_name(saved, optimizer, names)
    fresh: list[str] = []
    state: dict[int, Any] = {}
    values_of = {plain_name(name): values for name, values in saved["state"].items()}
    for group, now in zip(optimizer.param_groups, current["param_groups"], strict=True):
        mine = [names[p] for p in group["params"]]
        twin = _twin(mine, saved["param_groups"])
        if twin is not None:
            now.update({key: value for key, value in twin.items() if key != "params"})
        for parameter, name, index in zip(group["params"], mine, now["params"], strict=True):
            if name in values_of:
                fitted = {key: _fitted(value, parameter) for key, value in values_of[name].items()}
                state[index] = fitted if host is None else on_host(fitted)
            elif values_of:
                fresh.append(name)
    if fresh:
        log.warning(
            f"{len(fresh)} parameters did not train when the checkpoint was saved and start with fresh optimizer state, the "
            f"first is {fresh[0]!r}."
        )
    with nullcontext() if host is None else host.holding(optimizer):
        optimizer.load_state_dict({"state": state, "param_groups": current["param_groups"]})


def _fitted(value: Any, parameter: nn.Parameter) -> Any:
    """A saved value in its parameter's layout: moments are split as the parameter is, scalars are not."""
    if isinstance(value, Tensor):
        return place(value, parameter) if value.shape == parameter.shape else value.clone()
    return value


def _twin(names: list[str], saved_groups: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The saved group that holds most of ``names``, the earlier one of two; None where none holds any."""
    shared = [len(set(names) & set(map(plain_name, group["params"]))) for group in saved_groups]
    best = max(shared, default=0)
    return saved_groups[shared.index(best)] if best else None


def _by_name(saved: Mapping[str, Any], optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """A state keyed by position, keyed by the names of the parameters that now have those positions."""
    ours = optimizer.param_groups
    sizes, our_sizes = [len(g["params"]) for g in saved["param_groups"]], [len(g["params"]) for g in ours]
    if sizes != our_sizes:
        raise RuntimeError(
            f"The checkpoint's optimizer has groups of {sizes} parameters, this run's {type(optimizer).__name__} of "
            f"{our_sizes}, and they are known by position only. Build the same groups in configure_optimizers."
        )
    groups, state = [], {}
    for saved_group, group in zip(saved["param_groups"], ours, strict=True):
        mine = [names[p] for p in group["params"]]
        groups.append({**saved_group, "params": mine})
        state.update(
            {
                n: saved["state"][key]
                for n, key in zip(mine, saved_group["params"], strict=True)
                if key in saved["state"]
            }
        )
    return {"state": state, "param_groups": groups}


def split_tensors(state: Mapping[str, Any], prefix: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A named state without its tensors but with a list of them, and the tensors by ``prefix/name/key``."""
    tensors: dict[str, Tensor] = {}
    plain: dict[str, dict[str, Any]] = {}
    keys: dict[str, list[str]] = {}
    for name, values in state["state"].items():
        keys[name] = [key for key, value in values.items() if isinstance(value, Tensor)]
        plain[name] = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        tensors.update({f"{prefix}/{name}/{key}": values[key].detach() for key in keys[name]})
    return {**state, "state": plain, "tensors": keys}, tensors


def join_tensors(
    saved: Mapping[str, Any], prefix: str, stored: StoredTensors, module: nn.Module, *, to_host: bool = False
) -> dict[str, Any]:
    """The reverse of :func:`split_tensors`, for the parameters that ``module`` has, in their layouts."""
    parameters = {name: parameter for parameter, name in parameter_names(module).items()}
    wanted: dict[str, Tensor] = {}
    state: dict[str, dict[str, Any]] = {}
    for name, keys in saved["tensors"].items():
        if name not in parameters:
            continue
        state[name] = dict(saved["state"][name])
        for key in keys:
            full = f"{prefix}/{name}/{key}"
            size, dtype = stored.size(full), stored.dtype(full)
            like = parameters[name]
            value = (
                empty_in_layout(like, dtype, HOST if to_host else None)
                if size == like.shape
                else torch.empty(size, dtype=dtype)
            )
            state[name][key] = wanted[full] = value
    stored.read_into(wanted)
    return {"state": state, "param_groups": saved["param_groups"]}
