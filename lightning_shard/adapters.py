"""Low-rank adapters through peft: injected before sharding, with the same start everywhere."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_shard.parallelize.materialize import initialise_adapter, note_start, seeded

if TYPE_CHECKING:
    from peft import PeftModel

ADAPTERS: Mapping[str, dict[str, bool]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
}
"""Adapter method -> what it adds to peft's LoraConfig."""

SEEDED_INITS = (True, "gaussian")
"""Starts drawn at random; the others (pissa, olora, ...) follow from the base weights."""


def lora(
    model: nn.Module, r: int = 16, *, method: str = "lora", seed: int | None = None, **peft_kwargs: Any
) -> "PeftModel":
    """Wrap ``model`` with LoRA adapters: only they train, in FP32, the same on every rank and topology.

    Call it before the strategy shards: in ``__init__`` or ``configure_model``.

    Args:
        model: a transformers model or any module, on any device (on meta, the strategy initialises it).
        r: rank of the update, ``W + (alpha / r) B A`` with ``A`` of shape (r, in) and ``B`` (out, r).
        method: a key of :data:`ADAPTERS`.
        seed: of the random start of ``A``; by default the run's own seed (``seed_everything``).
        peft_kwargs: further fields of ``peft.LoraConfig`` (``lora_alpha``, ``target_modules``,
            ``lora_dropout``, ``modules_to_save``...). ``target_modules`` defaults to ``"all-linear"``.

    Returns:
        The ``PeftModel``. Its frozen base keeps the type it was loaded in.

    Raises:
        ValueError: for an unknown method, a model that is already sharded, or targets that match nothing
            (the names that could be meant are listed).
    """
    import peft

    if method not in ADAPTERS:
        raise ValueError(f"Adapter method {method!r} is not known. Use one of {', '.join(ADAPTERS)}.")
    if any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} is already sharded: adapters made now would have a shard's shape and no gradient "
            "reduction. Apply lora() before sharding, in __init__ or configure_model."
        )
    peft_kwargs.setdefault("target_modules", "all-linear")
    require_targets(model, peft_kwargs["target_modules"])
    require_targets(model, peft_kwargs.get("modules_to_save"), "modules_to_save")
    config = peft.LoraConfig(r=r, **ADAPTERS[method], **peft_kwargs)
    wrapped = peft.get_peft_model(model, config)
    if config.init_lora_weights in SEEDED_INITS:
        _start_by_name(wrapped, torch.initial_seed() if seed is None else seed, config.init_lora_weights)
    return wrapped


def lora_plus(module: nn.Module, lr: float, *, ratio: float = 16.0, weight_decay: float = 0.0) -> list[dict[str, Any]]:
    """Parameter groups of LoRA+ for any optimizer: ``B`` learns ``ratio`` times as fast as everything else.

    ``B`` starts at zero and is read through ``A``'s width, so equal rates move it too little (Hayou et al., 2024,
    "LoRA+"). Vectors (biases, norms, DoRA magnitudes) have no weight decay.

    Args:
        module: holds the adapters, sharded or not; call it in ``configure_optimizers``.
        lr: of ``A`` and of whatever else trains.
        ratio: learning rate of ``B`` over that of ``A``.
        weight_decay: of matrices.

    Raises:
        ValueError: when nothing that trains is an adapter's ``B``, or a number is out of range.
    """
    if not (lr > 0 and ratio > 0 and weight_decay >= 0):
        raise ValueError(f"lr={lr} and ratio={ratio} must be above 0, weight_decay={weight_decay} 0 or more.")
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            is_b = ".lora_B." in f".{name}." or ".lora_embedding_B." in f".{name}."
            groups.setdefault((is_b, parameter.dim() > 1), []).append(parameter)
    if not any(is_b for is_b, _ in groups):
        raise ValueError(
            f"{type(module).__name__} has no trainable lora_B: add adapters with lightning_shard.lora first."
        )
    return [
        {"params": held, "lr": lr * ratio if is_b else lr, "weight_decay": weight_decay if is_matrix else 0.0}
        for (is_b, is_matrix), held in sorted(groups.items(), key=lambda item: item[0])
    ]


def require_targets(model: nn.Module, targets: str | list[str] | None, what: str = "target_modules") -> None:
    """Raise ValueError unless every name in ``targets`` matches a layer of ``model``, as peft matches them.

    ``what`` names the argument they were given for. A string is a regular expression over whole names ("all-linear" stands for every linear layer), a list
    holds names or ends of names.
    """
    if targets is None or targets == "all-linear":
        return
    names = [name for name, module in model.named_modules() if name and not list(module.children())]
    missing = [targets] if isinstance(targets, str) else list(targets)
    if isinstance(targets, str):
        missing = [] if any(re.fullmatch(targets, name) for name, _ in model.named_modules()) else missing
    else:
        every = [name for name, _ in model.named_modules()]
        missing = [t for t in missing if not any(name == t or name.endswith(f".{t}") for name in every)]
    if missing:
        available = sorted(
            {name.rsplit(".", 1)[-1] for name in names if not name.rsplit(".", 1)[-1].isdigit()} or set(names)
        )
        raise ValueError(
            f"{what} {', '.join(map(repr, missing))} match no layer of {type(model).__name__}. An adapter "
            f"must sit on a layer that exists; the names available: {', '.join(available)}."
        )


def _start_by_name(model: nn.Module, seed: int, init: bool | str) -> None:
    """Draw every adapter from a generator seeded by its layer's name; on meta, once the strategy makes it real."""
    for name, layer in model.named_modules():
        if hasattr(layer, "reset_lora_parameters"):
            if any(p.is_meta for p in layer.parameters()):
                note_start(layer, seed, name, init)
            else:
                with seeded(seed, name):
                    initialise_adapter(layer, init)
