"""The wrap groups of a model under a plan, and what each weighs on the fullest rank."""

import math
from dataclasses import dataclass

from lightning_shard.plans import Plan
from lightning_shard.specs import ModelSpec, Precision, TensorSpec, UnitSpec, dtype_bytes

BIG_LEAF_SHARE = 0.25
"""An embedding or head gets a group of its own from this share of the largest block on; below, the root has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Bytes of one repetition of a wrap group."""

    kind: str
    count: int
    unit: UnitSpec
    frozen_bytes: int
    """Frozen weights at rest on the fullest rank."""
    trained_bytes: int
    """What trains, at rest, in its master dtype."""
    trained_numel: int
    """Its elements on the fullest rank."""
    gathered_bytes: int
    """All of the group in its compute dtype, as gathered; adapters kept outside do not count."""
    whole_numel: int
    """Trained elements of the whole group, not of a shard."""
    copied_numel: int
    """Elements of the whole group whose compute dtype is not the stored one: cast for every use, and kept by
    autograd until the layer's backward (a frozen matrix too: the gradient of its input needs it)."""
    largest_trained_numel: int
    """The largest trained tensor, whole."""


def find_groups(model: ModelSpec, precision: Precision, plan: Plan) -> tuple[Group, ...]:
    """The groups in the order block, embedding, head, root; small and tied leaves belong to the root."""
    largest_block = max((sum(t.numel for t in unit.tensors) for unit in model.blocks), default=0)
    groups = []
    for unit in model.units:
        kind = unit.kind
        if kind in ("embedding", "head") and not _own_group(model, unit, largest_block):
            kind = "root"
        groups.append(_weigh(unit, kind, precision, plan))
    return tuple(groups)


def shard_numel(tensor: TensorSpec, num_shards: int) -> int:
    """Elements of the fullest shard: rows in chunks of ceil(rows / n); columns where rows do not divide and
    columns do (so that ``lora_A`` with fewer rows than ranks is not padded).
    """
    shape = tensor.shape
    if num_shards == 1 or not shape:
        return tensor.numel
    if len(shape) >= 2 and shape[0] % num_shards and shape[1] % num_shards == 0:
        return tensor.numel // num_shards
    return math.ceil(shape[0] / num_shards) * math.prod(shape[1:])


def compute_element_bytes(tensor: TensorSpec, precision: Precision) -> int:
    """Bytes of an element when it is used; integers (quantised storage) are used as they are."""
    if precision.compute_dtype is None or "int" in tensor.dtype:
        return tensor.element_bytes
    return dtype_bytes(precision.compute_dtype)


def _own_group(model: ModelSpec, unit: UnitSpec, largest_block: int) -> bool:
    names = {f"{unit.names[0]}.{tensor.name}" for tensor in unit.tensors}
    tied = any(name in names for pair in model.tied for name in pair)
    return not tied and sum(tensor.numel for tensor in unit.tensors) >= BIG_LEAF_SHARE * largest_block


def _weigh(unit: UnitSpec, kind: str, precision: Precision, plan: Plan) -> Group:
    frozen = trained = trained_numel = gathered = whole = copied = largest = 0
    for tensor in unit.tensors:
        outside = tensor.adapter and plan.adapters == "replicated"
        shard = shard_numel(tensor, 1 if outside else plan.dp_shard)
        element = compute_element_bytes(tensor, precision)
        if not outside:
            gathered += tensor.numel * element
        if element != tensor.element_bytes and (tensor.trainable or len(tensor.shape) > 1):
            copied += tensor.numel
        if not tensor.trainable:
            frozen += shard * tensor.element_bytes
            continue
        trained += shard * tensor.element_bytes
        trained_numel += shard
        whole += tensor.numel
        largest = max(largest, tensor.numel)
    return Group(
        kind=kind,
        count=unit.count,
        unit=unit,
        frozen_bytes=frozen,
        trained_bytes=trained,
        trained_numel=trained_numel,
        gathered_bytes=gathered,
        whole_numel=whole,
        copied_numel=copied,
        largest_trained_numel=largest,
    )
