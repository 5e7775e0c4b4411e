"""The plans that are considered: every layout of the devices and every choice the engine carries out."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from lightning_shard.hardware import Cluster
from lightning_shard.plans import MIB, Plan, tuned_bucket_bytes
from lightning_shard.specs import ModelSpec, TrainSpec

ENGINE: dict[str, tuple[Any, ...]] = {
    "tp": (1,),
    "hybrid": (False,),
    "reshard_after_forward": (True, False),
    "adapters": ("sharded",),
    "activation_checkpoint": ("none",),
    "offload": ("none",),
    "resident_blocks": (0,),
    "compile": (False,),
}
"""What the planner proposes by itself, per field: what the engine carries out today. ``hybrid`` is
dp_replicate and dp_shard both above 1."""

PINNABLE: dict[str, tuple[Any, ...]] = {
    **ENGINE,
    "activation_checkpoint": ("none", "full"),
    "compile": (False, True),
}
"""What a user may ask for beyond that."""


def candidates(
    model: ModelSpec, train: TrainSpec, cluster: Cluster, pin: Mapping[str, Any] | None = None
) -> Iterator[Plan]:
    """Every plan the engine carries out on this cluster, pins honoured.

    Raises:
        ValueError: for a pin that names no field, or asks for what cannot be carried out here.
    """
    pin = pin or {}
    _check_pins(pin)
    names = [name for name in ENGINE if name not in ("tp", "hybrid")]
    choices = [(pin[name],) if name in pin else ENGINE[name] for name in names]
    free = {key: value for key, value in pin.items() if key not in (*names, "dp_replicate", "dp_shard", "tp")}
    seen = set()
    for replicate, shard, tp in _layouts(model, cluster, pin):
        for values in itertools.product(*choices):
            fields = {**dict(zip(names, values, strict=True)), **free}
            if shard == 1:  # nothing is gathered, so nothing is resharded or kept
                fields |= {"reshard_after_forward": True, "resident_blocks": 0, "adapters": "sharded"}
            if model.adapter is None:
                fields["adapters"] = "sharded"
            plan = _tuned(Plan(dp_replicate=replicate, dp_shard=shard, tp=tp, **fields), model)
            if plan not in seen:
                seen.add(plan)
                yield plan


def simplicity(plan: Plan) -> int:
    """How much machinery a plan needs; less is preferred whenever it fits."""
    return (
        (plan.dp_shard > 1)
        + 2 * (plan.activation_checkpoint != "none")
        + 4 * (plan.tp > 1)
        + 8 * (plan.offload != "none")
    )


def _layouts(model: ModelSpec, cluster: Cluster, pin: Mapping[str, Any]) -> Iterator[tuple[int, int, int]]:
    """(dp_replicate, dp_shard, tp) whose product is the world, simplest first."""
    world = cluster.world_size
    found = 0
    for tp in _divisors(world):
        if tp not in ENGINE["tp"] or not _tp_divides(model, cluster, tp):
            continue
        for shard in _divisors(world // tp):
            replicate = world // tp // shard
            if (replicate > 1 and shard > 1) not in ENGINE["hybrid"]:
                continue
            layout = {"dp_replicate": replicate, "dp_shard": shard, "tp": tp}
            if all(pin.get(name, size) == size for name, size in layout.items()):
                found += 1
                yield replicate, shard, tp
    if not found:
        wanted = {name: pin[name] for name in ("dp_replicate", "dp_shard", "tp") if name in pin}
        raise ValueError(
            f"No layout of {world} devices honours the pins {wanted}: dp_replicate x dp_shard x tp must be {world}, "
            "one of dp_replicate and dp_shard must be 1, and tp must be 1. Change the pins or the devices."
        )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _tp_divides(model: ModelSpec, cluster: Cluster, tp: int) -> bool:
    """Tensor parallelism stays inside a node and divides heads and key-value heads."""
    arch = model.architecture
    if tp == 1:
        return True
    return arch is not None and cluster.devices_per_node % tp == 0 and arch.heads % tp == 0 and arch.kv_heads % tp == 0


def _tuned(plan: Plan, model: ModelSpec) -> Plan:
    """The plan with its DDP buckets sized."""
    if plan.dp_shard > 1 or plan.dp_replicate == 1 or plan.bucket_cap_mb is not None:
        return plan
    size = tuned_bucket_bytes(4 * model.num_trainable, plan.world_size)
    return dataclasses.replace(plan, bucket_cap_mb=round(size / MIB, 3) or None)


def _check_pins(pin: Mapping[str, Any]) -> None:
    known = [field.name for field in dataclasses.fields(Plan)]
    for name, value in pin.items():
        if name not in known:
            raise ValueError(f"pin {name!r} is not a field of a Plan. Fields: {', '.join(known)}.")
        allowed = PINNABLE.get(name)
        if allowed is not None and value not in allowed:
            raise ValueError(
                f"pin {name}={value!r} cannot be carried out yet. Choose from {', '.join(map(repr, allowed))}."
            )
