"""Does a run's set-up fit together: callbacks, checkpoints, memory, loaders."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_shard._compat import LightningModule, Trainer
from lightning_shard.checkpoint.remote import is_remote
from lightning_shard.doctor.finding import Finding
from lightning_shard.doctor.machine import check_disk, check_files, check_shared_memory
from lightning_shard.specs import format_bytes

REWRITES_WEIGHTS = ("ModelPruning",)
SAVES_ON_ONE_RANK = ("OnExceptionCheckpoint",)
MASTER_STATE_BYTES = 12
"""FP32 master and Adam's two moments of one trained element."""


def check_callbacks(trainer: Trainer, *, sharded: bool) -> Iterator[Finding]:
    """Callbacks that this layout does not carry."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set from another class
        names = {cls.__name__ for cls in type(callback).__mro__}
        name = type(callback).__name__
        if sharded and names & set(REWRITES_WEIGHTS):
            yield Finding(
                level="error",
                check="callbacks",
                what=f"{name} does not work on a sharded module.",
                why="It rewrites whole weights, and each rank holds a part of them.",
                fix='Leave it out, or keep whole copies: strategy="tuned-ddp", or AutoShardStrategy(pin={"dp_shard": 1}).',
            )
        if sharded and names & set(SAVES_ON_ONE_RANK):
            yield Finding(
                level="warning",
                check="callbacks",
                what=f"{name} saves when an error is raised.",
                why="Saving a sharded module takes all ranks: after an error on one of them it waits for the others.",
                fix="Use ModelCheckpoint(every_n_train_steps=...) instead.",
            )


def check_checkpoints(trainer: Trainer, module: nn.Module) -> Iterator[Finding]:
    """Room for the checkpoints that the run's callbacks will write."""
    checkpointing = [
        callback
        for callback in trainer.checkpoint_callbacks
        if (folder := getattr(callback, "dirpath", None)) and not is_remote(folder)
    ]
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad) * MASTER_STATE_BYTES
    whole = trained + sum(p.numel() * p.element_size() for p in module.parameters() if not p.requires_grad)
    for callback in checkpointing:
        kept = getattr(callback, "save_top_k", 1)
        yield from check_disk(Path(callback.dirpath), least_bytes=trained, wanted_bytes=whole * max(1, kept))  # type: ignore[attr-defined]


def check_memory(trainer: Trainer) -> Iterator[Finding]:
    """Is what the plan needs still free."""
    device, estimate = trainer.strategy.root_device, getattr(trainer.strategy, "estimate", None)
    if device.type != "cuda" or estimate is None:
        return
    free, _ = torch.cuda.mem_get_info(device)
    mine = torch.cuda.memory_reserved(device)
    if free + mine < estimate.reserved_bytes:
        yield Finding(
            level="warning",
            check="memory",
            what=f"{device} has {format_bytes(free + mine)} for this run, and the plan needs {format_bytes(estimate.reserved_bytes)}.",
            why="Another process took memory since the plan was made.",
            fix="End it (nvidia-smi lists processes), or start again: the plan is made from what is free.",
        )


def check_loaders(trainer: Trainer) -> Iterator[Finding]:
    """Limits that data-loading workers meet."""
    num_workers = max((loader.num_workers for loader in _loaders(trainer)), default=0)
    yield from check_files(num_workers)
    yield from check_shared_memory(num_workers)


def check_module(trainer: Trainer, module: LightningModule, at_start: set[int]) -> Iterator[Finding]:
    """Everything about the module and its optimizers; ``at_start``: what trained when the strategy was set up."""
    from lightning_shard.doctor.model import check_adapters, check_optimizers, check_sync, check_tensors

    layout = getattr(trainer.strategy, "_layout", None)
    yield from check_tensors(module)
    yield from check_sync(
        module, trainer.strategy.model, getattr(layout, "replicated", None), trainer.world_size, at_start
    )
    yield from check_optimizers(module, trainer.optimizers)
    if trainer.global_step == 0 and not trainer.ckpt_path:
        yield from check_adapters(module)


def _loaders(trainer: Trainer) -> list[Any]:
    loaders: Any = trainer.train_dataloader
    flat = loaders.flattened if hasattr(loaders, "flattened") else [loaders]
    return [loader for loader in flat if isinstance(loader, torch.utils.data.DataLoader)]
