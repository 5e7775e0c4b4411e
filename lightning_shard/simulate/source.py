"""What is simulated: a root module with a training step, its batch and its optimizers, from whatever was given."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shard._compat import LightningModule
from lightning_shard.simulate.build import add_adapter, build_on_meta
from lightning_shard.simulate.causal import CausalStep, token_batch
from lightning_shard.simulate.optimizers import make_optimizer
from lightning_shard.simulate.user import configured_optimizers, prepare_user_module
from lightning_shard.specs import TrainSpec

Source = str | Path | nn.Module | Callable[[], nn.Module]


@dataclass(frozen=True, kw_only=True)
class Runnable:
    """A root module on meta and what a step of it takes."""

    root: nn.Module
    batch: Callable[[], Any]
    optimizers: Callable[[nn.Module], list[Optimizer]]


def make_runnable(source: Source, train: TrainSpec, *, batch: Any = None, dtype: str | None = None) -> Runnable:
    """Build what was given on the meta device.

    Raises:
        ValueError: for a module without a training step that is no causal language model, or without a batch.
    """
    module = build_on_meta(_factory(source), train, dtype=dtype)
    if isinstance(module, LightningModule):
        prepare_user_module(module, train)
        if train.adapter is not None:
            raise ValueError(
                f"{type(module).__name__} is a LightningModule and train.adapter asks for an adapter as well. Add it in "
                "the module (lightning_shard.lora) and leave train.adapter out."
            )
        return Runnable(root=module, batch=_user_batch(module, batch, train), optimizers=configured_optimizers)
    if train.adapter is not None:
        module = add_adapter(module, train.adapter)
    root = module if hasattr(module, "training_step") else _causal_step(module, train)
    return Runnable(
        root=root,
        batch=(lambda: token_batch(train)) if batch is None else _maker(batch),
        optimizers=lambda laid_out: [make_optimizer(laid_out.parameters(), train)],
    )


def copy_to_meta(module: nn.Module) -> nn.Module:
    """A copy of a live module whose tensors are on the meta device; a Trainer it belongs to is left behind."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        for owner in (vars(part), part._parameters, part._buffers):
            for value in owner.values():
                if isinstance(value, Tensor) and id(value) not in memo:
                    memo[id(value)] = _meta_like(value)
        if "_trainer" in vars(part):
            memo[id(vars(part)["_trainer"])] = None
    return copy.deepcopy(module, memo)


def _meta_like(tensor: Tensor) -> Tensor:
    meta = torch.empty_like(tensor, device="meta")
    return nn.Parameter(meta, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta


def _factory(source: Source) -> str | Path | Callable[[], nn.Module]:
    if isinstance(source, nn.Module):
        module = source
        return lambda: copy_to_meta(module)
    return source


def _causal_step(module: nn.Module, train: TrainSpec) -> nn.Module:
    base: Any = module.get_base_model() if hasattr(module, "get_base_model") else module  # type: ignore[operator]
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    if head is None:
        raise ValueError(
            f"{type(base).__name__} has no training_step and is no causal language model, so there is no step to "
            "simulate. Give a LightningModule, or a module with training_step(batch, batch_idx)."
        )
    return CausalStep(module, train.loss)


def _user_batch(module: nn.Module, batch: Any, train: TrainSpec) -> Callable[[], Any]:
    if batch is not None:
        return _maker(batch)
    if type(module).__name__ == "CausalLM":
        return lambda: {"input_ids": token_batch(train), "labels": token_batch(train)}
    raise ValueError(
        f"What a batch of {type(module).__name__} looks like is not known. Pass batch=, the largest one a step sees, or a "
        "function that makes it."
    )


def _maker(batch: Any) -> Callable[[], Any]:
    """A function that makes a batch like this one, without its values."""
    if callable(batch):
        make: Callable[[], Any] = batch
        return make
    return lambda: apply_to_collection(batch, Tensor, lambda each: torch.empty(each.shape, dtype=each.dtype))
