"""The weights of an open checkpoint, for the layout that a module has now."""

from typing import Any

from torch import Tensor, nn

from lightning_shard.checkpoint.directory import SavedCheckpoint
from lightning_shard.checkpoint.module_state import empty_in_layout
from lightning_shard.checkpoint.names import plain_name

MODEL = "model/"


def read_module_values(saved: SavedCheckpoint, module: nn.Module) -> dict[str, Any]:
    """Fresh tensors by plain name: each rank reads its own shards of what ``module`` has, and the rest whole.

    Raises:
        RuntimeError: when a shape differs.
    """
    own = {plain_name(name): value for name, value in module.state_dict().items()}
    stored, values = saved.tensors, dict(saved.trainer["state_dict"])
    wanted: dict[str, Tensor] = {}
    for full in sorted(name for name in stored.names if name.startswith(MODEL)):
        name = full.removeprefix(MODEL)
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
    for alias, name in saved.trainer["aliases"].items():
        values[alias] = values[name]
    return values
