"""Does everything that trains have its gradient averaged once, and an optimizer."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from lightning_shard._compat import ddp_reduced
from lightning_shard.doctor.finding import Finding

SHOWN = 5


def check_sync(
    module: nn.Module, wrapped: Any, replicated: Any, world_size: int, at_start: set[int]
) -> Iterator[Finding]:
    """Exactly one gradient reduction for each trainable parameter.

    Args:
        module: the LightningModule.
        wrapped: what the strategy runs: DDP's wrapper, or the module itself.
        replicated: the flat reductions of a sharded plan; None where there are none.
        world_size: ranks; a single one needs no reduction.
        at_start: identities of what trained when DDP's wrapper was made: it reduces nothing else.
    """
    if world_size == 1:
        return
    wrapper = ddp_reduced(wrapped) if isinstance(wrapped, DistributedDataParallel) else []
    by_ddp = {id(p) for p in wrapper} & at_start

    def paths(parameter: nn.Parameter) -> int:
        flat = replicated is not None and parameter in replicated
        return isinstance(parameter, DTensor) + flat + (id(parameter) in by_ddp)

    counts = {name: paths(p) for name, p in module.named_parameters() if p.requires_grad}
    lost = [name for name, count in counts.items() if count == 0]
    double = [name for name, count in counts.items() if count > 1]
    if lost:
        yield Finding(
            level="error",
            check="gradient reduction",
            what=f"{len(lost)} trainable parameters were added after the module was sharded or wrapped, or unfrozen since, and "
            f"no gradient reduction covers them; the first is {lost[0]!r}.",
            why="Every rank would train its own copy.",
            fix="Add and unfreeze layers in __init__ or configure_model, before the strategy lays the module out.",
        )
    if double:
        yield Finding(
            level="error",
            check="gradient reduction",
            what=f"{_listed(double)}: more than one gradient reduction covers them.",
            why="Their gradients would be averaged twice.",
            fix="Leave sharding and wrapping to the strategy, or do all of it in configure_model.",
        )


def check_optimizers(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Finding]:
    """All that trains is in an optimizer, and no group mixes layouts that one kernel cannot step."""
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    idle = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in held]
    if idle and optimizers:
        yield Finding(
            level="warning",
            check="optimizer",
            what=f"{_listed(idle)}: trainable, but in no optimizer.",
            why="They cost gradients, memory and traffic and never change.",
            fix="Give them to the optimizer in configure_optimizers, or freeze them with requires_grad_(False).",
        )
    for optimizer in optimizers:
        for index, group in enumerate(optimizer.param_groups):
            layouts = {isinstance(p, DTensor) for p in group["params"]}
            if len(layouts) > 1 and (group.get("fused") or group.get("foreach")):
                yield Finding(
                    level="error",
                    check="optimizer",
                    what=f"Group {index} of {type(optimizer).__name__} mixes sharded and whole parameters and is fused.",
                    why="A fused or foreach kernel fails on such a mix in its first step.",
                    fix="Put whole and sharded parameters in groups of their own, or use adapters='replicated' or 'sharded' for all.",
                )


def check_tensors(module: nn.Module) -> Iterator[Finding]:
    """Nothing is left without memory, and each group of a sharded module has one type among what trains."""
    named = [*module.named_parameters(), *module.named_buffers()]
    meta = [name for name, tensor in named if tensor.is_meta]
    if meta:
        yield Finding(
            level="error",
            check="meta tensors",
            what=f"{_listed(meta)}: on the meta device, without values.",
            why="Nothing can be computed with them.",
            fix="Load or initialise them in configure_model, or give their modules a reset_parameters method.",
        )
    for name, types in _types_by_group(module).items():
        if len(types) > 1:
            shown = ", ".join(sorted(str(one).removeprefix("torch.") for one in types))
            yield Finding(
                level="error",
                check="types",
                what=f"What trains in the shard group of {name or 'the root'} has the types {shown}.",
                why="A group's gradients are reduced as one buffer of one type.",
                fix="Give what trains one type (FP32 is right for masters), or shard it in groups of its own.",
            )


def _types_by_group(module: nn.Module) -> dict[str, set[torch.dtype]]:
    from torch.distributed.fsdp import FSDPModule

    types: dict[str, set[torch.dtype]] = {}

    def visit(part: nn.Module, name: str, group: str) -> None:
        group = name if isinstance(part, FSDPModule) else group
        for parameter in part.parameters(recurse=False):
            if parameter.requires_grad and isinstance(parameter, DTensor):
                types.setdefault(group, set()).add(parameter.dtype)
        for child_name, child in part.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name, group)

    visit(module, "", "")
    return types


def check_adapters(module: nn.Module) -> Iterator[Finding]:
    """Fresh adapters start from zero, so that the first step starts from the base model."""
    started = [
        name
        for name, parameter in module.named_parameters()
        if "lora_B" in name and parameter.requires_grad and not parameter.is_meta and _any(parameter)
    ]
    if started and _zero_expected(module):
        yield Finding(
            level="warning",
            check="adapters",
            what=f"{_listed(started)}: not zero at the start.",
            why="Training then starts from another function than the base model's. After loading a trained adapter that is "
            "as it should be; for a fresh one the initialisation was lost.",
            fix="Add fresh adapters with lightning_shard.lora, and do not reset modules after that.",
        )


def _any(parameter: nn.Parameter) -> bool:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return bool(local.detach().any())


def _zero_expected(module: nn.Module) -> bool:
    """Whether peft was asked for an initialisation that leaves B at zero (PiSSA and others do not)."""
    configs = [config for part in module.modules() for config in (getattr(part, "peft_config", None) or {}).values()]
    return all(getattr(config, "init_lora_weights", True) in (True, "gaussian", "orthogonal") for config in configs)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"
