"""The weights of a module as a checkpoint holds them: by plain name, each once, in whatever layout is in force."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_shard.checkpoint.names import plain_name


def named_values(module: nn.Module, left_out: Iterable[str] = ()) -> dict[str, Any]:
    """The state dict of ``module`` by plain name, with live tensors (plain or DTensor), without ``left_out``.

    The names of a tied tensor hold one and the same object.
    """
    skipped, shared = set(left_out), _shared_names(module)
    values: dict[str, Any] = {}
    for name, value in module.state_dict().items():
        plain = plain_name(name)
        if plain not in skipped:
            values[plain] = values.get(shared.get(plain, plain), value)
    return values


def split_values(values: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str], dict[str, Any]]:
    """Tensors, each once; further names of tied ones with the name each is held under; and all that is no tensor."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    rest: dict[str, Any] = {}
    first: dict[int, str] = {}
    for name, value in values.items():
        if not isinstance(value, Tensor):
            rest[name] = value
        elif first.setdefault(id(value), name) != name:
            aliases[name] = first[id(value)]
        else:
            tensors[name] = value.detach()
    return tensors, aliases, rest


def load_state(module: nn.Module, saved: Mapping[str, Any], *, absent: Iterable[str] = (), strict: bool = True) -> None:
    """Load tensors by plain name, whole or in this layout, into ``module``.

    Args:
        module: in any layout.
        saved: plain tensors are whole; DTensors have the module's layout.
        absent: names that the checkpoint rightly does not hold.
        strict: whether missing and unexpected names are errors.

    Raises:
        RuntimeError: with ``strict``, naming what is missing or unexpected; for a wrong shape always.
    """
    real = {plain_name(name): name for name in module.state_dict()}
    own = module.state_dict()
    shared = _shared_names(module)
    placed = {}
    for name, value in saved.items():
        plain = plain_name(name)
        target = own.get(real.get(plain, plain))
        placed[real.get(plain, plain)] = place(value, target, plain)
    result = module.load_state_dict(placed, strict=False)
    loaded = {shared.get(plain_name(name), plain_name(name)) for name in placed}
    known = {*absent, *(name for name in real if shared.get(name, name) in loaded)}
    missing = [name for name in map(plain_name, result.missing_keys) if name not in known]
    if strict and (missing or result.unexpected_keys):
        raise RuntimeError(
            f"The checkpoint does not fit {type(module).__name__}. "
            + _listed("Missing from the checkpoint", missing)
            + _listed("Unexpected in the checkpoint", result.unexpected_keys)
            + "Build the module that was trained, or set its strict_loading to False."
        )


def place(value: Any, target: Any, name: str = "") -> Any:
    """A saved value in the layout of ``target``: a whole tensor is split where that is."""
    if not isinstance(value, Tensor) or not isinstance(target, Tensor):
        return value
    if value.shape != target.shape:
        raise RuntimeError(
            f"{name!r} has shape {tuple(value.shape)} in the checkpoint and {tuple(target.shape)} in the module. Build the "
            "module that was trained."
        )
    if isinstance(target, DTensor) and not isinstance(value, DTensor):
        whole = value.to(target.device_mesh.device_type)
        return distribute_tensor(whole, target.device_mesh, target.placements, src_data_rank=None)
    return value


def whole(value: Any, keep: bool) -> Any:
    """A value gathered to the host where ``keep``; None elsewhere. Collective for a DTensor."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if not isinstance(value, Tensor):
        return value
    return value.detach().cpu() if keep else None


def empty_in_layout(target: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
    """A fresh tensor in the layout of ``target``, of its type and on its device by default."""
    return torch.empty_like(target, dtype=dtype or target.dtype, device=device or target.device, requires_grad=False)


def _shared_names(module: nn.Module) -> dict[str, str]:
    """Plain name of every further place of a tied parameter or buffer, and the first of its names."""
    first: dict[int, str] = {}
    shared = {}
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    for name, value in named:
        plain = plain_name(name)
        if first.setdefault(id(value), plain) != plain:
            shared[plain] = first[id(value)]
    return shared


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{what}: {', '.join(map(repr, names[:5]))}{more}. "
