"""The layouts of a cluster, and what a user may pin."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_shard.hardware import Cluster
from lightning_shard.plans import MIB, Plan, tuned_bucket_bytes
from lightning_shard.specs import ModelSpec, TrainSpec
from lightning_shard.specs.split import why_not_split

PINNABLE: dict[str, tuple[Any, ...]] = {
    "offload": ("none", "optimizer", "all"),
    "activation_checkpoint": ("none", "selective", "full"),
}
"""Where the planner cannot weigh everything the Plan can say: what a user may ask of it."""
WITHOUT_TP: dict[str, tuple[Any, ...]] = {"adapters": ("sharded",), "resident_blocks": (0, (), [])}
"""What the engine asks of a plan that splits layers over tensor-parallel ranks."""


def layouts(model: ModelSpec, cluster: Cluster, pin: Mapping[str, Any]) -> Iterator[tuple[int, int, int]]:
    """(dp_replicate, dp_shard, tp) whose product is the world and that honour the pins, simplest first. Tensor
    parallelism only as the model's layers divide, inside a node.

    Raises:
        ValueError: when there is none, or the pinned ``tp`` cannot be carried out; says why.
    """
    found = False
    for layout in find_layouts(model, cluster, pin):
        found = True
        yield layout
    if not found:
        wanted = {name: pin[name] for name in _LAYOUT_PINS if name in pin}
        world = cluster.world_size
        raise ValueError(
            f"No layout of {world} devices honours the pins {wanted}: dp_replicate x dp_shard x tp must be {world}, "
            "offload=all needs shards, and a number for reshard_after_forward must divide dp_shard. Change the pins or "
            "the devices."
        )


_LAYOUT_PINS = ("dp_replicate", "dp_shard", "tp", "offload", "reshard_after_forward")


def find_layouts(model: ModelSpec, cluster: Cluster, pin: Mapping[str, Any]) -> Iterator[tuple[int, int, int]]:
    """As :func:`layouts`, none where none honours the pins."""
    world = cluster.world_size
    for tp in _tensor_sizes(model, cluster, pin):
        for shard in divisors(world // tp):
            layout = {"dp_replicate": world // tp // shard, "dp_shard": shard, "tp": tp}
            if shard == 1 and tp == 1 and (pin.get("offload") == "all" or _sharing(pin) > 1):
                continue  # shards can wait in host memory or on fewer ranks, whole copies cannot
            if shard % _sharing(pin):
                continue
            if all(pin.get(name, size) == size for name, size in layout.items()):
                yield layout["dp_replicate"], shard, tp


def _sharing(pin: Mapping[str, Any]) -> int:
    """The ranks that a pinned ``reshard_after_forward`` has share a block between forward and backward."""
    ranks = pin.get("reshard_after_forward", True)
    return 1 if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1 else ranks


def _tensor_sizes(model: ModelSpec, cluster: Cluster, pin: Mapping[str, Any]) -> list[int]:
    """The tensor-parallel sizes to weigh: the pinned one, or all that can be carried out."""
    if "tp" in pin:
        refusal = why_not_tp(model, cluster, pin["tp"], pin)
        if refusal is not None:
            raise ValueError(f"pin tp={pin['tp']!r} cannot be carried out: {refusal}.")
        return [pin["tp"]]
    return [tp for tp in divisors(cluster.devices_per_node) if why_not_tp(model, cluster, tp, pin) is None]


def why_not_tp(model: ModelSpec, cluster: Cluster, tp: int, pin: Mapping[str, Any]) -> str | None:
    """Why a plan cannot have this ``tp``; None when it can."""
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        return "it must be a whole number, 1 or more"
    if tp == 1:
        return None
    if cluster.devices_per_node % tp:
        return f"its ranks must lie inside a node, and it does not divide the {cluster.devices_per_node} devices of one"
    for name, allowed in WITHOUT_TP.items():
        if name in pin and pin[name] not in allowed:
            return f"{name}={pin[name]!r} does not go with tensor parallelism, leave that pin out"
    return why_not_split(model, tp)


def why_not_resident(model: ModelSpec, train: TrainSpec) -> str | None:
    """Why no block can be kept whole on every rank; None when it can.

    A resident block is cast for every forward where the compute type is not the stored one. peft's adapters on bare
    parameters (stacked experts and their router) take the parameter's place, where no cast would be read.
    """
    row = train.precision_row
    if model.architecture is None or not model.architecture.experts or not row.compute_dtype:
        return None
    tensors = [tensor for unit, tensor in model.tensors() if unit.kind == "block"]
    bare = any(tensor.adapter and ("experts" in tensor.name or ".gate." in tensor.name) for tensor in tensors)
    stored = {row.frozen_dtype or tensor.dtype for tensor in tensors if not tensor.adapter}
    if not bare or stored == {row.compute_dtype}:
        return None
    return (
        f"the adapters of bare expert weights exclude the casts to {row.compute_dtype} that resident blocks need under "
        f"precision={train.precision!r}; use precision='bf16-true', load the base in {row.compute_dtype}, or adapt "
        "linear layers only"
    )


def base_plan(layout: tuple[int, int, int], model: ModelSpec, pin: Mapping[str, Any]) -> Plan:
    """The layout's plainest plan that honours the pins. Adapters are replicated beside sharded blocks: their
    gradients then travel once a step in one piece, and nothing of them is gathered.
    """
    replicate, shard, tp = layout
    fields = dict(pin)
    if tp > 1:
        fields |= {"adapters": "sharded", "resident_blocks": 0}
    elif shard == 1:  # nothing is gathered, so nothing is resharded or kept
        fields |= {"reshard_after_forward": True, "resident_blocks": 0, "adapters": "sharded"}
    elif model.adapter is not None:
        fields.setdefault("adapters", "replicated")
    if shard > 1 or tp > 1:
        fields["torch_ddp"] = False
    plan = Plan(**{**fields, "dp_replicate": replicate, "dp_shard": shard, "tp": tp})
    if plan.strategy == "fsdp2" or replicate == 1 or plan.bucket_cap_mb is not None:
        return plan
    size = tuned_bucket_bytes(4 * model.num_trainable, plan.world_size)
    return dataclasses.replace(plan, bucket_cap_mb=math.ceil(size / MIB * 1000) / 1000)


def simplicity(plan: Plan) -> int:
    """How much machinery a plan needs; of plans that are as fast, the one with less is preferred."""
    return (
        (plan.dp_shard > 1)
        + (plan.dp_shard > 1 and plan.dp_replicate > 1)
        + 2 * (plan.activation_checkpoint != "none")
        + 4 * (plan.tp > 1)
        + 8 * (plan.offload != "none")
    )


def divisors(number: int) -> list[int]:
    """All divisors, in order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def check_pins(pin: Mapping[str, Any]) -> None:
    """Raise unless every pin is a field of a Plan with a value it can have and the planner can weigh.

    Raises:
        TypeError: when the pins are no mapping.
        ValueError: naming the pin, its value and the rule.
    """
    if not isinstance(pin, Mapping):
        raise TypeError(f"pin={pin!r} must map fields of a Plan to values, such as {{'dp_shard': 8}}.")
    known = [field.name for field in dataclasses.fields(Plan)]
    for name, value in pin.items():
        if name not in known:
            raise ValueError(f"pin {name!r} is not a field of a Plan. Fields: {', '.join(known)}.")
        allowed = PINNABLE.get(name)
        if allowed is not None and value not in allowed:
            raise ValueError(
                f"pin {name}={value!r} cannot be weighed yet. Choose from {', '.join(map(repr, allowed))}."
            )
        if name not in ("tp", "reshard_after_forward"):  # checked with the layouts
            Plan(**{name: value})
