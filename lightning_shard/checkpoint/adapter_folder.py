"""The trained adapter as a PEFT folder beside each checkpoint."""

import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_shard.checkpoint.atomic import let_others_read
from lightning_shard.checkpoint.background import copy_to_host
from lightning_shard.checkpoint.gathering import gather_on_first, in_one_piece
from lightning_shard.checkpoint.module_state import whole
from lightning_shard.checkpoint.names import plain_name
from lightning_shard.parallelize.together import rank_in


def adapter_writer(
    root: nn.Module, folder_name: str, group: dist.ProcessGroup | None, *, copy: bool
) -> Callable[[], Callable[[Path], None] | None]:
    """Take the adapters of ``root`` as they are now. What is returned gathers them (collective over ``group``, maybe while
    training goes on), and gives the first rank what writes them below a folder; None where there are none.

    Args:
        root: holds peft models, sharded or not.
        folder_name: of the PEFT folder; a second peft model's has a number.
        group: of the writers.
        copy: training goes on while the result is used.
    """
    found = [module for module in root.modules() if _is_peft_model(module)]
    states = [_trained(model) for model in found]
    if copy:
        states = [copy_to_host(state) for state in states]

    def gather() -> Callable[[Path], None] | None:
        whole = [gather_on_first(state, group) for state in states]
        return partial(_write, found, whole, folder_name) if found and rank_in(group) == 0 else None

    return gather


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: in_one_piece(value.detach()) for name, value in _by_place(model, trained_only=True)}


def _by_place(model: nn.Module, *, trained_only: bool) -> Iterable[tuple[str, Tensor]]:
    """Names and live tensors. What trains is named by where it is, wrappers included: peft looks for its layers there."""
    if not trained_only:
        return model.state_dict(keep_vars=True).items()
    return [item for item in model.named_parameters(remove_duplicate=False) if item[1].requires_grad]


def name_plainly(folder: Path) -> None:
    """Take the names of wrappers off the tensors in a PEFT folder."""
    for file in folder.rglob("adapter_model.safetensors"):
        weights = load_file(file)
        plain = {plain_name(name): value for name, value in weights.items()}
        if plain.keys() != weights.keys():
            save_file(plain, file, metadata={"format": "pt"})


def _write(models: list[Any], states: list[dict[str, Tensor]], folder_name: str, folder: Path) -> None:
    for number, (model, state) in enumerate(zip(models, states, strict=True)):
        name = folder_name if number == 0 else f"{folder_name}-{number}"
        model.save_pretrained(folder / name, state_dict=state)
        name_plainly(folder / name)
        let_others_read(folder / name)


def gathered(module: nn.Module, *, trained_only: bool, keep: bool) -> dict[str, Tensor]:
    """A module's whole tensors on the CPU; names that share a tensor still do. Collective where it is sharded.

    Args:
        module: with all its wrappers' prefixes off its state dict's names.
        trained_only: leave out parameters that are frozen, and buffers; :func:`name_plainly` follows then.
        keep: this rank wants the result; the others take part in the gathering and get nothing.
    """
    found: dict[int, Any] = {}
    state: dict[str, Any] = {}
    for name, value in _by_place(module, trained_only=trained_only):
        if id(value) not in found:
            found[id(value)] = whole(value.detach(), keep)
        state[name] = found[id(value)]
    return state if keep else {}


def _is_peft_model(module: nn.Module) -> bool:
    """Whether it is peft's own wrapper: the tuner and the model inside answer to the same names."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(module, peft.PeftModel)
