"""Lightning's weight averaging (EMA, SWA) on modules of any layout.

The callbacks copy the module before it is laid out, and average that copy with what trains. Here the copy gets the
layout: each of its parameters becomes a copy of the parameter it averages, shard by shard, so that averaging needs no
traffic and no more memory than its share.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.swa_utils import AveragedModel

from lightning_shard._compat.sharded import AVERAGING_METHODS, averaged_copy

_SERVED = "_lightning_shard_served"


def follow_layout(
    callbacks: Iterable[Any],
    root: nn.Module,
    rest: Callable[[], None],
    *,
    folders: bool = False,
) -> None:
    """Give the copies of weight averaging callbacks the layout of ``root``.

    Args:
        callbacks: of the trainer; those that average are found.
        root: laid out, at the start of a fit.
        rest: makes the parameters of ``root`` the shards, where they are gathered.
        folders: whether checkpoints are folders, into which every rank writes its shards; a file has whole tensors.

    Raises:
        ValueError: for a copy that was made before ``configure_model`` built the module.
    """
    for callback, copy in _copies(callbacks):
        _mirror(_inner(copy), root, type(callback).__name__)
    serve_shards(callbacks, root, rest, folders=folders)


def averaged_modules(callbacks: Iterable[Any]) -> list[nn.Module]:
    """The averages that callbacks of Lightning's keep, each of the same make as the module that trains."""
    return [_inner(copy) for _, copy in _copies(callbacks)]


def serve_shards(callbacks: Iterable[Any], root: nn.Module, rest: Callable[[], None], *, folders: bool) -> None:
    """Have averaging callbacks read, save and load shards, where ``root`` has any; once for each copy.

    Args:
        callbacks: of the trainer.
        root: laid out.
        rest: makes the parameters of ``root`` the shards, where they are gathered.
        folders: whether checkpoints are folders, into which every rank writes its shards; a file has whole tensors.
    """
    if not any(isinstance(p, DTensor) for p in root.parameters()):
        return
    for callback, copy in _copies(callbacks):
        if copy.__dict__.setdefault(_SERVED, False):
            continue
        copy.__dict__[_SERVED] = True
        for owner, name in ((callback, name) for name in AVERAGING_METHODS if hasattr(callback, name)):
            _rest_first(owner, name, rest)
        if isinstance(copy, AveragedModel):
            _rest_first(copy, "update_parameters", rest)
            _load_both(callback, copy, root, rest)
        if not folders:
            copy.state_dict = partial(_whole_state, copy)
        copy.load_state_dict = partial(_load_whole_state, copy)


def _copies(callbacks: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Each averaging callback with the copy it keeps."""
    found = [(callback, averaged_copy(callback)) for callback in callbacks]
    return [(callback, copy) for callback, copy in found if copy is not None]


def _inner(copy: Any) -> nn.Module:
    module: nn.Module = copy.module if isinstance(copy, AveragedModel) else copy
    return module


def _whole_state(module: nn.Module) -> dict[str, Any]:
    """A module's whole state in host memory, on rank 0; a collective."""
    whole = {}
    for name, value in type(module).state_dict(module).items():  # not the instance's own, which leads here
        gathered = value.full_tensor() if isinstance(value, DTensor) else value
        if dist.get_rank() == 0:
            whole[name] = gathered.detach().cpu().clone()
    return whole


@torch.no_grad()
def _load_whole_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load tensors that are whole on every rank, or in the module's layout, into a module of any layout.

    Raises:
        RuntimeError: naming what is missing, or in excess.
    """
    own = type(module).state_dict(module)
    odd = sorted(own.keys() ^ state.keys())
    if odd:
        raise RuntimeError(
            f"The checkpoint's averaged weights and this module differ in {len(odd)} names, the first is {odd[0]!r}."
        )
    for name, value in own.items():
        whole = state[name].to(value.device)
        if isinstance(value, DTensor) and not isinstance(whole, DTensor):
            whole = distribute_tensor(whole, value.device_mesh, value.placements, src_data_rank=None)
        value.copy_(whole)


def _mirror(copy: nn.Module, root: nn.Module, name: str) -> None:
    """Make every parameter and buffer of ``copy`` a copy of that of ``root``."""
    there = dict(copy.named_modules())
    copies: dict[int, Any] = {}
    for path, module in root.named_modules():
        if path not in there:
            raise ValueError(
                f"{name} copied the module before configure_model built {path!r}, so it would average nothing. Build the "
                "module in __init__."
            )
        for key, parameter in module._parameters.items():
            if parameter is not None:
                fresh = copies.get(id(parameter))
                if fresh is None:
                    fresh = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                    copies[id(parameter)] = fresh
                there[path]._parameters[key] = fresh
        for key, buffer in module._buffers.items():
            there[path]._buffers[key] = None if buffer is None else buffer.detach().clone()


def _rest_first(owner: Any, name: str, rest: Callable[[], None]) -> None:
    original = getattr(owner, name)

    def rested(*args: Any, **kwargs: Any) -> Any:
        rest()
        return original(*args, **kwargs)

    setattr(owner, name, rested)


def _load_both(callback: Any, copy: Any, root: nn.Module, rest: Callable[[], None]) -> None:
    """Restore what Lightning's callback saved: the average as ``state_dict``, and beside it what trains."""
    original = callback.on_load_checkpoint

    def on_load_checkpoint(trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        if not {"current_model_state", "averaging_state"} <= checkpoint.keys():
            original(trainer, module, checkpoint)
            return
        _load_whole_state(copy.module, checkpoint["state_dict"])
        copy.n_averaged.copy_(checkpoint["averaging_state"]["n_averaged"])
        rest()
        _load_whole_state(root, checkpoint["current_model_state"])

    callback.on_load_checkpoint = on_load_checkpoint
