"""The trained model as a folder that plain peft or transformers opens."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.finetune.agree import on_all_ranks
from lightning_shard.finetune.folders import whole_folder


def save(model: Any, folder: Path, processor: Any, *, writes: bool) -> None:
    """Write a PEFT adapter folder, or, of a model without adapters, a whole Hugging Face folder.

    Collective: every rank calls it, the one with ``writes`` writes. Of a sharded model one parameter at a
    time is gathered, and with adapters only what trained: never the frozen base.

    Args:
        model: a ``PeftModel`` or a ``PreTrainedModel``, sharded or not.
        folder: appears whole, replacing what was there.
        processor: the tokenizer or image processor, written beside a whole model; an adapter's base has its own.
        writes: whether this rank writes.
    """
    from peft import PeftModel

    adapters = isinstance(model, PeftModel)
    state = gathered(model, trained_only=adapters, keep=writes)

    def write() -> None:
        if writes:
            with whole_folder(folder) as fresh:
                model.save_pretrained(fresh, state_dict=state)
                if not adapters:
                    processor.save_pretrained(fresh)

    on_all_ranks(write)


def gathered(module: nn.Module, *, trained_only: bool, keep: bool) -> dict[str, Tensor]:
    """A module's whole tensors on the CPU; names that share a tensor still do. Collective where it is sharded.

    Args:
        module: with all its wrappers' prefixes off its state dict's names.
        trained_only: leave out parameters that are frozen, and buffers.
        keep: this rank wants the result; the others take part in the gathering and get nothing.
    """
    whole: dict[int, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if trained_only and not value.requires_grad:
            continue
        if id(value) not in whole:
            whole[id(value)] = _whole(value, keep)
        state[name] = whole[id(value)]
    return state if keep else {}


def _whole(value: Tensor, keep: bool) -> Tensor:
    value = value.detach()
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.cpu() if keep else torch.empty(0)
