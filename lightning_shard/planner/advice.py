"""What would make a training fit: changes that were tried out, least painful first."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_shard.hardware import Cluster
from lightning_shard.planner.considered import consider
from lightning_shard.specs import AdapterSpec, ModelSpec, TrainSpec

MOST_TIMES_DEVICES = 64


def what_helps(
    model: ModelSpec, train: TrainSpec, cluster: Cluster, limit_bytes: int, pin: Mapping[str, Any]
) -> Iterator[str]:
    """Sentences, each naming a change with which some plan fits."""

    def fits(train: TrainSpec = train, cluster: Cluster = cluster, pin: Mapping[str, Any] = pin) -> bool:
        return any(one.needs_bytes <= limit_bytes for one in consider(model, train, cluster, pin))

    recompute = {**pin, "activation_checkpoint": "full"}
    if pin != recompute and fits(pin=recompute):
        yield "with activation checkpointing it fits (--pin activation_checkpoint=full)"
    smaller = list(_smaller(train))
    if (less := next((one for one in smaller if fits(one)), None)) is not None:
        yield f"with {_batch(less)} it fits"
    elif (less := next((one for one in smaller if fits(one, pin=recompute)), None)) is not None:
        yield f"with {_batch(less)} and activation checkpointing it fits"
    yield from _adapters(model, train, fits, recompute)
    if "dp_replicate" not in pin and "dp_shard" not in pin:
        yield from _more_devices(cluster, fits, recompute)


def _smaller(train: TrainSpec) -> Iterator[TrainSpec]:
    """Smaller micro-batches, then shorter sequences."""
    size = train.micro_batch_size
    while size > 1:
        size //= 2
        yield dataclasses.replace(train, micro_batch_size=size)
    length = train.seq_len
    while length > 512:
        length //= 2
        yield dataclasses.replace(train, micro_batch_size=1, seq_len=length)


def _batch(train: TrainSpec) -> str:
    return f"micro-batch {train.micro_batch_size} of {train.seq_len} tokens"


def _adapters(model: ModelSpec, train: TrainSpec, fits: Any, recompute: Mapping[str, Any]) -> Iterator[str]:
    everything = model.num_trainable == model.num_parameters
    linear = any(len(tensor.shape) == 2 and tensor.owner in ("Linear", "Conv1D") for _, tensor in model.tensors())
    if train.adapter is not None or not everything or not linear:
        return
    lora = dataclasses.replace(train, adapter=AdapterSpec())
    if fits(lora):
        yield "with LoRA r16 on all linear layers it fits (--lora-r 16)"
    elif fits(lora, pin=recompute):
        yield "with LoRA r16 and activation checkpointing it fits (--lora-r 16 --pin activation_checkpoint=full)"


def _more_devices(cluster: Cluster, fits: Any, recompute: Mapping[str, Any]) -> Iterator[str]:
    factor = 2
    while factor <= MOST_TIMES_DEVICES:
        more = dataclasses.replace(cluster, num_nodes=cluster.num_nodes * factor)
        if fits(cluster=more):
            yield f"{more.world_size} such devices are enough"
            return
        if fits(cluster=more, pin=recompute):
            yield f"{more.world_size} such devices are enough with activation checkpointing"
            return
        factor *= 2
