"""The weights of an open checkpoint, for the layout that a module has now."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_shard.checkpoint.directory import SavedCheckpoint
from lightning_shard.checkpoint.module_state import empty_in_layout
from lightning_shard.checkpoint.names import plain_name

MODEL = "model/"
"""Before the names of a module's tensors."""
CURRENT = "current/"
"""Before those that train, where the module's are an average of them."""
CURRENT_STATE, CURRENT_ALIASES = "current_model_state", "current_aliases"
"""Lightning's name for what trains beside an average, and ours for the further names of tied tensors in it."""


def read_module_values(saved: SavedCheckpoint, module: nn.Module) -> dict[str, Any]:
    """Fresh tensors by plain name: each rank reads its own shards of what ``module`` has, and the rest whole.

    Raises:
        RuntimeError: when a shape differs.
    """
    return _read(saved, module, MODEL, saved.trainer["state_dict"], saved.trainer["aliases"])


def read_trained_values(saved: SavedCheckpoint, module: nn.Module) -> dict[str, Any]:
    """Where weights are averaged, what trains lies beside the average: ``current_model_state``, or nothing."""
    if CURRENT_ALIASES not in saved.trainer:  # no average, or saved whole among the trainer's values
        return {}
    aliases = saved.trainer[CURRENT_ALIASES]
    return {CURRENT_STATE: _read(saved, module, CURRENT, saved.trainer[CURRENT_STATE], aliases)}


def _read(
    saved: SavedCheckpoint, module: nn.Module, kind: str, rest: Mapping[str, Any], aliases: Mapping[str, str]
) -> dict[str, Any]:
    own = {plain_name(name): value for name, value in module.state_dict().items()}
    stored, values = saved.tensors, dict(rest)
    wanted: dict[str, Tensor] = {}
    for full in sorted(name for name in stored.names if name.startswith(kind)):
        name = full.removeprefix(kind)
        target = own.get(name)
        if isinstance(target, Tensor) and target.shape != stored.size(full):
            raise RuntimeError(
                f"{name!r} has shape {tuple(stored.size(full))} in {saved.path} and {tuple(target.shape)} in "
                f"{type(module).__name__}. Build the module that was trained."
            )
        if isinstance(target, Tensor):
            values[name] = wanted[full] = empty_in_layout(target)
        else:
            values[name] = stored.read_whole(full)
    stored.read_into(wanted)
    for alias, name in aliases.items():
        values[alias] = values[name]
    return values
