"""Parameter names without what compilation and activation checkpointing put into them."""

import torch
from torch import nn

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Left out of every name that is saved, and looked through when it is loaded."""


def plain_name(name: str) -> str:
    """The name as it is without wrappers."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parameter_names(module: nn.Module) -> dict[nn.Parameter, str]:
    """Plain name of every parameter; a tied one has the first of its names."""
    return {parameter: plain_name(name) for name, parameter in module.named_parameters()}


def frozen_base_names(module: nn.Module) -> set[str]:
    """Plain names of the frozen parameters below peft's adapters: what a run with adapters need not save.

    Frozen parameters elsewhere may exist nowhere else, and do not count.
    """
    names = set()
    for prefix, part in module.named_modules():
        if hasattr(part, "peft_config"):
            inside = part.named_parameters(prefix, remove_duplicate=False)
            names |= {plain_name(name) for name, parameter in inside if not parameter.requires_grad}
    return names


def all_frozen_names(module: nn.Module) -> set[str]:
    """Plain names of every frozen parameter."""
    named = module.named_parameters(remove_duplicate=False)
    return {plain_name(name) for name, parameter in named if not parameter.requires_grad}


def base_path(module: nn.Module) -> str | None:
    """The folder or hub id that the frozen model below the adapters was loaded from, where it has one."""
    for part in module.modules():
        if hasattr(part, "peft_config"):
            for config in part.peft_config.values():  # type: ignore[union-attr,operator]
                path = getattr(config, "base_model_name_or_path", None)
                if path:
                    return str(path)
    return None


def is_tensor(value: object) -> bool:
    """Whether a value of a state dict is a tensor, sharded or not."""
    return isinstance(value, torch.Tensor)
