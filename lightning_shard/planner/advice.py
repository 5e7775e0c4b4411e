"""What would make a training fit: changes that were tried out, least painful first."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from lightning_shard.hardware import Cluster
from lightning_shard.planner.considered import inject
from lightning_shard.planner.search import Search
from lightning_shard.specs import AdapterSpec, ModelSpec, TrainSpec

MOST_TIMES_DEVICES = 64
Surroundings = Literal["python", "command line"]
"""Where a sentence will be read: it names what its reader can type."""
_TYPED: dict[Surroundings, dict[str, str]] = {
    "python": {
        "recompute": "pin={'activation_checkpoint': 'full'}",
        "optimizer": "pin={'offload': 'optimizer'}",
        "offload": "pin={'offload': 'all'}",
        "adapter": "lightning_shard.lora(model, r=16)",
    },
    "command line": {
        "recompute": "--pin activation_checkpoint=full",
        "optimizer": "--pin offload=optimizer",
        "offload": "--pin offload=all",
        "adapter": "--lora-r 16",
    },
}


def what_helps(
    model: ModelSpec,
    train: TrainSpec,
    cluster: Cluster,
    limit_bytes: int,
    pin: Mapping[str, Any],
    surroundings: Surroundings = "python",
) -> Iterator[str]:
    """Sentences, each naming a change with which some plan fits."""
    typed = _TYPED[surroundings]

    def fits(train: TrainSpec = train, cluster: Cluster = cluster, pin: Mapping[str, Any] = pin) -> bool:
        search = Search(inject(model, train), train, cluster, limit_bytes, pin)
        return search.has_layouts() and search.leanest().needs_bytes <= limit_bytes

    recompute = {**pin, "activation_checkpoint": "full"}
    if pin.get("activation_checkpoint") == "none" and fits(pin=recompute):
        yield f"with activation checkpointing it fits ({typed['recompute']})"
    if "offload" not in pin and fits(pin={**pin, "offload": "optimizer"}):
        yield f"with the optimizer's state in host memory it fits, slower by the update ({typed['optimizer']})"
    elif "offload" not in pin and cluster.world_size > 1 and fits(pin={**pin, "offload": "all"}):
        yield f"with shards in host memory it fits, several times slower ({typed['offload']})"
    smaller = list(_smaller(train))
    if (less := next((one for one in smaller if fits(one)), None)) is not None:
        yield f"with {_batch(less)} it fits"
    yield from _adapters(model, train, fits, typed["adapter"])
    if "dp_replicate" not in pin and "dp_shard" not in pin:
        yield from _more_devices(cluster, fits)


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


def _adapters(model: ModelSpec, train: TrainSpec, fits: Any, typed: str) -> Iterator[str]:
    everything = model.num_trainable == model.num_parameters
    linear = any(len(tensor.shape) == 2 and tensor.owner in ("Linear", "Conv1D") for _, tensor in model.tensors())
    if train.adapter is not None or not everything or not linear:
        return
    if fits(dataclasses.replace(train, adapter=AdapterSpec())):
        yield f"with LoRA r16 on all linear layers it fits ({typed})"


def _more_devices(cluster: Cluster, fits: Any) -> Iterator[str]:
    factor = 2
    while factor <= MOST_TIMES_DEVICES:
        more = dataclasses.replace(cluster, num_nodes=cluster.num_nodes * factor)
        if fits(cluster=more):
            yield f"{more.world_size} such devices are enough"
            return
        factor *= 2
