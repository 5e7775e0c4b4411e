"""The trained adapter as a PEFT folder beside each checkpoint."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lightning_shard.checkpoint.module_state import whole


def adapter_writer(root: nn.Module, folder_name: str, *, keep: bool) -> Callable[[Path], None] | None:
    """What writes the adapters of ``root`` below a folder later on; None where there are none. Collective.

    Args:
        root: holds peft models, sharded or not.
        folder_name: of the PEFT folder; a second peft model's has a number.
        keep: this rank writes; the others take part in the gathering.
    """
    found = [module for module in root.modules() if _is_peft_model(module)]
    states = [gathered(model, trained_only=True, keep=keep, copy=True) for model in found]
    if not found or not keep:
        return None

    def write(folder: Path) -> None:
        for number, (model, state) in enumerate(zip(found, states, strict=True)):
            name = folder_name if number == 0 else f"{folder_name}-{number}"
            model.save_pretrained(folder / name, state_dict=state)  # type: ignore[operator]

    return write


def gathered(module: nn.Module, *, trained_only: bool, keep: bool, copy: bool = False) -> dict[str, Tensor]:
    """A module's whole tensors on the CPU; names that share a tensor still do. Collective where it is sharded.

    Args:
        module: with all its wrappers' prefixes off its state dict's names.
        trained_only: leave out parameters that are frozen, and buffers.
        keep: this rank wants the result; the others take part in the gathering and get nothing.
        copy: training may go on while the result is used.
    """
    found: dict[int, Any] = {}
    state: dict[str, Any] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if trained_only and not value.requires_grad:
            continue
        if id(value) not in found:
            found[id(value)] = whole(value.detach(), keep)
            if copy and keep:
                found[id(value)] = found[id(value)].clone()
        state[name] = found[id(value)]
    return state if keep else {}


def _is_peft_model(module: nn.Module) -> bool:
    """Whether it is peft's own wrapper: the tuner and the model inside answer to the same names."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.PeftModel)
