"""The wrap groups of a model under a plan, and what each weighs on the fullest rank."""

import dataclasses
import itertools
import math
from dataclasses import dataclass

from lightning_shard.plans import Plan
from lightning_shard.specs import ModelSpec, Precision, TensorSpec, UnitSpec, dtype_bytes
from lightning_shard.specs.sizes import allocated_bytes
from lightning_shard.specs.split import rank_unit

BIG_LEAF_SHARE = 0.25
"""An embedding or head gets a group of its own from this share of the largest block on; below, the root has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Bytes of one repetition of a wrap group on the fullest rank.

    A sharded plan leaves some tensors outside its groups, whole on every rank: the frozen ones of resident
    groups, and what trains where adapters are replicated. In a replicated plan everything is whole.
    """

    kind: str
    count: int
    unit: UnitSpec
    resident: bool
    """Kept between forward and backward whatever the plan does with the others."""
    frozen_bytes: int
    """Frozen weights at rest."""
    trained_bytes: int
    """What trains, at rest, in its master dtype."""
    trained_numel: int
    """Its elements, of what the group shards."""
    flat_numel: int
    """Elements that train outside the group."""
    gathered_bytes: int
    """The group in its compute dtype, as gathered."""
    whole_numel: int
    """Trained elements of the whole group, not of a shard."""
    copied_numel: int
    """Elements that nothing gathers and whose compute dtype is not the stored one: cast for every use, and kept by
    autograd until the layer's backward (a frozen matrix too: the gradient of its input needs it)."""
    cached_numel: int
    """Of those, the ones that train: autocast keeps their casts until its region ends."""
    largest_trained_numel: int
    """The largest trained tensor, whole."""
    stored_bytes: int
    """The whole group as it is loaded, before anything is cut."""


def find_groups(model: ModelSpec, precision: Precision, plan: Plan) -> tuple[Group, ...]:
    """The groups in the order of the model's units; small and tied leaves belong to the root.

    A run of equal blocks of which some are resident becomes several groups.
    """
    largest_block = max((sum(t.numel for t in unit.tensors) for unit in model.blocks), default=0)
    resident = _resident_names(model, plan)
    groups = []
    for unit in model.units:
        kind = unit.kind
        if kind in ("embedding", "head") and not _own_group(model, unit, largest_block):
            kind = "root"
        for is_resident, names in itertools.groupby(unit.names, key=lambda name: name in resident):
            part = rank_unit(model, dataclasses.replace(unit, names=tuple(names)), plan.tp)
            stored = sum(tensor.numel * tensor.element_bytes for tensor in unit.tensors)
            groups.append(_weigh(part, kind, precision, plan, resident=is_resident, stored_bytes=stored))
    return tuple(groups)


def _resident_names(model: ModelSpec, plan: Plan) -> set[str]:
    """Named units, or the last N blocks; N at or above all blocks means embedding, head and root too."""
    if plan.dp_shard == 1 or not plan.resident_blocks:
        return set()
    if isinstance(plan.resident_blocks, tuple):
        return set(plan.resident_blocks)
    blocks = [name for unit in model.blocks for name in unit.names]
    if blocks and plan.resident_blocks >= len(blocks):
        return {name for unit in model.units for name in unit.names}
    return set(blocks[len(blocks) - plan.resident_blocks :])


def shard_numel(tensor: TensorSpec, num_shards: int, *, by_rows: bool = False) -> int:
    """Elements of the fullest shard: rows in chunks of ceil(rows / n); columns where rows do not divide and
    columns do (so that ``lora_A`` with fewer rows than ranks is not padded). ``by_rows`` where tensor parallelism
    has placed the tensor already: then always rows.
    """
    shape = tensor.shape
    if num_shards == 1 or not shape:
        return tensor.numel
    if not by_rows and len(shape) >= 2 and shape[0] % num_shards and shape[1] % num_shards == 0:
        return tensor.numel // num_shards
    return math.ceil(shape[0] / num_shards) * math.prod(shape[1:])


def compute_element_bytes(tensor: TensorSpec, precision: Precision) -> int:
    """Bytes of an element when it is used; integers (quantised storage) are used as they are."""
    if precision.compute_dtype is None or "int" in tensor.dtype:
        return tensor.element_bytes
    return dtype_bytes(precision.compute_dtype)


def is_autocast(precision: Precision, plan: Plan) -> bool:
    """Whether a replicated plan computes under ``torch.autocast``: precisions that leave storage alone."""
    return plan.strategy == "ddp" and precision.compute_dtype is not None and precision.frozen_dtype is None


def _is_cast(tensor: TensorSpec, *, autocast: bool) -> bool:
    """Whether using a tensor makes a copy in the compute type; autocast does not know grouped products."""
    if autocast and len(tensor.shape) == 3 and "experts" in tensor.name:
        return False
    return tensor.trainable or len(tensor.shape) > 1


def _own_group(model: ModelSpec, unit: UnitSpec, largest_block: int) -> bool:
    names = {f"{unit.names[0]}.{tensor.name}" for tensor in unit.tensors}
    tied = any(name in names for pair in model.tied for name in pair)
    return not tied and sum(tensor.numel for tensor in unit.tensors) >= BIG_LEAF_SHARE * largest_block


def _weigh(unit: UnitSpec, kind: str, precision: Precision, plan: Plan, *, resident: bool, stored_bytes: int) -> Group:
    sums = dict.fromkeys(("frozen", "trained", "numel", "flat", "gathered", "whole", "copied", "cached", "largest"), 0)
    for tensor in unit.tensors:
        element = compute_element_bytes(tensor, precision)
        alone = plan.adapters == "replicated" if tensor.trainable else resident
        gathered = plan.strategy == "fsdp2" and not alone
        shard = shard_numel(tensor, plan.dp_shard, by_rows=plan.tp > 1) if gathered else tensor.numel
        sums["trained" if tensor.trainable else "frozen"] += allocated_bytes(shard * tensor.element_bytes)
        if gathered:
            sums["gathered"] += tensor.numel * element
        elif element != tensor.element_bytes and _is_cast(tensor, autocast=is_autocast(precision, plan)):
            numel = allocated_bytes(tensor.numel * element) // element
            sums["copied"] += numel
            sums["cached"] += numel if tensor.trainable else 0
        if not tensor.trainable:
            continue
        sums["largest"] = max(sums["largest"], tensor.numel)
        if plan.strategy == "fsdp2" and alone:
            sums["flat"] += tensor.numel
        else:
            sums["numel"] += shard
            sums["whole"] += tensor.numel
    return Group(
        kind=kind,
        count=unit.count,
        unit=unit,
        resident=resident,
        frozen_bytes=sums["frozen"],
        trained_bytes=sums["trained"],
        trained_numel=sums["numel"],
        flat_numel=sums["flat"],
        gathered_bytes=sums["gathered"],
        whole_numel=sums["whole"],
        copied_numel=sums["copied"],
        cached_numel=sums["cached"],
        largest_trained_numel=sums["largest"],
        stored_bytes=stored_bytes,
    )
