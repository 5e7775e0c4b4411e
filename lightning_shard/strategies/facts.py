"""What an auto strategy reads off a run before it plans: the batch, the optimizer, the devices."""

import dataclasses
import logging
import os
from collections.abc import Sequence, Sized
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from lightning_shard._compat import LightningModule, Trainer, TrainerFn, evaluation_loaders, isolate_rng, train_loaders
from lightning_shard.hardware import HOST, Cluster, Device, find_device, link_between_nodes, link_inside_node
from lightning_shard.hardware.host import measured_host
from lightning_shard.memory.overheads import CONTEXT_BYTES
from lightning_shard.specs import OPTIMIZERS, TrainSpec

log = logging.getLogger(__name__)

DEFAULT_OPTIMIZER = "adamw"


def describe_training(trainer: Trainer, module: LightningModule, precision: str) -> TrainSpec:
    """The TrainSpec of this run. Every rank calls it: the optimizer hook may use collectives.

    A module may say in ``planned_loss`` what becomes of its logits (a value of ``TrainSpec.loss``).
    The batch is the longest allowed one where the data module or the module has a ``max_seq_len``, else the
    first rows of the training data, collated as the loader would (nothing is consumed: random state and
    iterable data sets are left alone).
    """
    fitting = trainer.state.fn == TrainerFn.FITTING
    with isolate_rng():
        batch_size, length, _ = _batch(trainer)
        longest = _longest(trainer, module)
        optimizer, implementation = _optimizer(module, trainer) if fitting else (DEFAULT_OPTIMIZER, "loop")
    return TrainSpec(
        micro_batch_size=batch_size or 1,
        seq_len=longest or length or 1,
        accumulate=trainer.accumulate_grad_batches,
        precision=precision,
        optimizer=optimizer,
        optimizer_implementation=implementation,  # type: ignore[arg-type]
        attention=_attention(module),  # type: ignore[arg-type]
        loss=getattr(module, "planned_loss", "full"),
        gradients_cleared="before_backward",  # as Lightning's closure does
    )


def largest_batch(trainer: Trainer, module: LightningModule) -> Any:
    """A batch as the loader makes it, its sequences repeated to the longest allowed length; None where unknown."""
    with isolate_rng():
        _, length, rows = _batch(trainer)
    longest = _longest(trainer, module)
    if rows is None or not length or not longest or longest <= length:
        return rows

    def stretch(tensor: Tensor) -> Tensor:
        if tensor.dim() < 2 or tensor.shape[1] != length:
            return tensor
        return torch.cat([tensor] * -(-longest // length), dim=1)[:, :longest]

    return apply_to_collection(rows, Tensor, stretch)


def free_device_memory(device: torch.device, num_local: int) -> int:
    """Bytes this process may use: of its accelerator, or its share of the host's free memory.

    An accelerator's context is up by now, so what is free lacks it; the estimate counts it, so it is added back.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) + CONTEXT_BYTES)
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return max(1, host_available(available) // max(1, num_local))


def describe_cluster(device: torch.device, num_nodes: int, num_local: int, memory_bytes: int) -> Cluster:
    """The cluster of this run, for the planner. An accelerator that the table does not know is said to be unknown."""
    row = measured_host(num_local) if device.type == "cpu" else _accelerator(device)
    return Cluster(
        num_nodes=num_nodes,
        devices_per_node=num_local,
        device=row,
        device_memory_bytes=memory_bytes,
        intra_link=link_inside_node(row.intra_link),
        inter_link=link_between_nodes(row.intra_link),
        accelerator="cpu" if device.type == "cpu" else "gpu",
    )


def _accelerator(device: torch.device) -> Device:
    name = torch.cuda.get_device_name(device)
    row = find_device(name)
    if row is None:
        log.warning("%s is not in the hardware table: the plan's memory is right, its step time is not known.", name)
        row = dataclasses.replace(HOST, name=f"unknown ({name})", host_work_s=0.0, source="none: not in the table")
    return row


def host_available(default: int) -> int:
    """Bytes of host memory that are free or can be freed; ``default`` where the system does not tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            found = {key: int(rest.split()[0]) * 1024 for key, rest in (line.split(":", 1) for line in lines)}
    except FileNotFoundError:  # not Linux: the free pages are what there is to know
        return default
    return found.get("MemAvailable", default)


def _datamodule(trainer: Trainer) -> Any:
    return getattr(trainer, "datamodule", None)


def _max_seq_len(owner: Any) -> int | None:
    value = getattr(owner, "max_seq_len", None)
    return value if isinstance(value, int) and value > 0 else None


def _longest(trainer: Trainer, module: LightningModule) -> int | None:
    return next((n for n in map(_max_seq_len, (_datamodule(trainer), module)) if n), None)


def _batch(trainer: Trainer) -> tuple[int | None, int | None, Any]:
    """Rows and tokens per row of one batch, and the batch; None where they cannot be known without consuming data."""
    fitting = trainer.state.fn == TrainerFn.FITTING
    loader = _first_loader(train_loaders(trainer) if fitting else evaluation_loaders(trainer))
    if loader is None:
        return None, None, None
    size = _rows_per_batch(loader)
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__len__"):
        if _longest(trainer, trainer.lightning_module) is None:
            log.warning(
                "The length of an iterable data set is not known before it is read: planned for single tokens. Give the "
                "data module a max_seq_len, or pass AutoShardStrategy(train=TrainSpec(...))."
            )
        return size, None, None
    try:
        rows = _collated(loader, size)
    except Exception as error:  # whatever the user's data set raises; the run itself will tell if it matters
        log.warning(
            "The first rows of the training data could not be read to plan by (%s: %s): planned for single tokens. Give "
            "the data module a max_seq_len, or pass AutoShardStrategy(train=TrainSpec(...)).",
            type(error).__name__,
            error,
        )
        return size, None, None
    shape = _shape(rows)
    return size or (shape[0] if shape else None), shape[1] if shape else None, rows


def _rows_per_batch(loader: "DataLoader[Any]") -> int | None:
    """Rows of the loader's batches, without asking its sampler for any: its order may depend on how often it was asked.

    A sampler of the user's own that does not say its ``batch_size`` is taken to use each row once.
    """
    sampler: Any = loader.batch_sampler
    size = loader.batch_size or getattr(sampler, "batch_size", None)
    if size or sampler is None:
        return size
    if isinstance(sampler, Sequence):
        return max(map(len, sampler), default=None)
    if not (isinstance(sampler, Sized) and isinstance(loader.dataset, Sized) and len(sampler)):
        return None
    size = -(-len(loader.dataset) // len(sampler))
    log.warning(
        "%s does not say its batch_size: planned for %d rows per batch, the data set over its number of batches. Give it "
        "a batch_size, or pass AutoShardStrategy(train=TrainSpec(...)).",
        type(sampler).__name__,
        size,
    )
    return size


def _collated(loader: "DataLoader[Any]", size: int | None) -> Any:
    dataset: Any = loader.dataset
    if loader.batch_sampler is None:
        return loader.collate_fn(dataset[0])
    size = size or 1
    return loader.collate_fn([dataset[i] for i in range(min(size, len(dataset)))])


def _first_loader(loaders: Any) -> "DataLoader[Any] | None":
    if isinstance(loaders, DataLoader):
        return loaders
    inner = getattr(loaders, "iterables", loaders)
    values = list(inner.values()) if isinstance(inner, dict) else inner if isinstance(inner, (list, tuple)) else []
    return next((found for value in values if (found := _first_loader(value)) is not None), None)


def _shape(batch: Any) -> tuple[int, int] | None:
    """(rows, tokens): from the first matrix of integers, else rows of the first tensor and one token."""
    tensors = list(_tensors(batch))
    for tensor in tensors:
        if tensor.dim() == 2 and not tensor.is_floating_point():
            return tensor.shape[0], tensor.shape[1]
    return next(((t.shape[0], 1) for t in tensors if t.dim()), None)


def _tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict) or hasattr(value, "items"):
        for _, item in value.items():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _optimizer(module: LightningModule, trainer: Trainer) -> tuple[str, str]:
    """Name and implementation of the optimizer with the most parameters, from the module's own hook."""
    found = [value for value in _flatten(module.configure_optimizers()) if isinstance(value, Optimizer)]
    if not found:
        return "sgd", "loop"
    heaviest = max(found, key=lambda o: sum(p.numel() for group in o.param_groups for p in group["params"]))
    group = heaviest.param_groups[0]
    name = type(heaviest).__name__.lower()
    if name == "sgd" and group.get("momentum"):
        name = "sgd-momentum"
    if name not in OPTIMIZERS:
        log.warning("The state of %s is not known: planned as AdamW's.", type(heaviest).__name__)
        name = DEFAULT_OPTIMIZER
    on_device = trainer.strategy.root_device.type != "cpu"
    foreach = group.get("foreach") or (group.get("foreach") is None and on_device)
    return name, "fused" if group.get("fused") else "foreach" if foreach else "loop"


def _flatten(value: Any) -> Any:
    if isinstance(value, dict):
        yield from _flatten(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flatten(item)
    else:
        yield value


def _attention(module: LightningModule) -> str:
    kinds = {getattr(getattr(m, "config", None), "_attn_implementation", None) for m in module.modules()}
    return "eager" if "eager" in kinds else "sdpa"
