"""Fully sharded data parallelism, unit by unit, as the Plan says."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard

from lightning_shard._compat import fsdp_reduce_unused, fsdp_root_init
from lightning_shard.parallelize import prefetch
from lightning_shard.parallelize.cast import cast_tensors
from lightning_shard.parallelize.norms import kept_wide
from lightning_shard.parallelize.pairs import gather_in_pairs, is_pair
from lightning_shard.parallelize.storage import is_packed, to_dtype
from lightning_shard.parallelize.units import Units, warn_no_blocks
from lightning_shard.plans import Plan
from lightning_shard.specs import Precision

STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")


def shard(
    units: Units,
    plan: Plan,
    mesh: DeviceMesh,
    precision: Precision,
    before: Callable[[nn.Module], None],
    forward_methods: tuple[str, ...] = (),
    load: Callable[[], None] = lambda: None,
) -> tuple[set[nn.Parameter], list[Any]]:
    """Shard ``units`` over ``mesh`` in place; the root comes last and takes what no unit holds.

    Args:
        units: blocks, embeddings, heads and the root they sit in.
        plan: says what is sharded, and what is freed when.
        mesh: axis ``dp_shard``, or ``dp_replicate`` and ``dp_shard``; a ``tp`` axis is left alone.
        precision: the policy gathers in its compute type and reduces in its reduce type.
        before: called with each unit just before it is sharded (it loads or initialises the unit, so
            that never more than one whole unit is in memory).
        forward_methods: further methods of the root that compute with its weights.
        load: called once everything is sharded: reads what is still on the meta device.

    Returns:
        The parameters left whole on every rank (those of them that train still need their gradients averaged), and
        handles whose ``remove()`` takes off what is on the root beside FSDP.

    Raises:
        ValueError: when the plan names a resident block that does not exist.
    """
    if not units.blocks and mesh.get_rank() == 0:
        warn_no_blocks(units.root)
    policy = mixed_precision_policy(precision)
    data_axes = tuple(axis for axis in mesh.mesh_dim_names or () if axis != "tp")
    common: dict[str, Any] = {"mesh": mesh[data_axes], "shard_placement_fn": _placement(mesh["dp_shard"].size())}
    if plan.offload == "all":
        common["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    resident = resident_units(plan, units)
    whole = unshardable(units)
    for name, unit in units.all():
        if isinstance(unit, FSDPModule):
            continue  # the user sharded it
        before(unit)
        whole |= kept_whole(unit, plan, precision, resident=name in resident)
        if all(p in whole for p in unit.parameters()):
            continue
        _require_shardable(unit, whole, name)
        keep = name in resident or name in {head for head, _ in units.heads}
        reshard = False if keep else plan.reshard_after_forward
        fully_shard(unit, reshard_after_forward=reshard, mp_policy=policy, ignored_params=whole, **common)
    for _, unit in units.embeddings:
        if isinstance(unit, FSDPModule) and isinstance(unit, nn.Embedding):
            unit.set_unshard_in_backward(False)  # the gradient of a look-up does not need the table
    before(units.root)
    whole |= kept_whole(units.root, plan, precision, resident="" in resident)
    if not isinstance(units.root, FSDPModule):
        _require_shardable(units.root, whole, "the root")
        fully_shard(units.root, mp_policy=_root_policy(policy, precision), ignored_params=whole, **common)
    fsdp_reduce_unused(units.root)
    streams = prefetch.has_streams(mesh)
    prefetch.gather_ahead(units, plan.prefetch, streams=streams)
    if not streams:
        _transfer_on_host(units.root, plan, mesh)
    load()
    return whole, _open_root(units.root, policy.param_dtype, forward_methods)


def _transfer_on_host(root: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Where there are no streams: reductions beside backward where nothing goes on with them at once, and pairs' exchanges."""
    beside = bool(plan.prefetch) and plan.dp_replicate == 1 and plan.offload == "none" and plan.tp == 1
    pair = is_pair(mesh["dp_shard"].get_group(), mesh.device_type)
    if beside or pair:
        prefetch.HostReductions(beside=beside).install(root)
    if pair:
        gather_in_pairs(root)


def resident_units(plan: Plan, units: Units) -> set[str]:
    """Names of the units that stay whole: named ones, or the last N blocks.

    The last blocks, because backward starts with them. N at or above the number of blocks means everything:
    embedding, head and root ("") as well.
    """
    names = [name for name, _ in units.blocks]
    if isinstance(plan.resident_blocks, tuple):
        known = {*(name for name, _ in units.all()), ""}
        unknown = [name for name in plan.resident_blocks if name not in known]
        if unknown:
            raise ValueError(
                f"The plan keeps {', '.join(unknown)} resident, which the module does not have. Its units: {', '.join(sorted(known - {''}))}."
            )
        return set(plan.resident_blocks)
    if names and plan.resident_blocks >= len(names):
        return {*(name for name, _ in units.all()), ""}
    return set(names[len(names) - plan.resident_blocks :])


def unshardable(units: Units) -> set[nn.Parameter]:
    """Parameters no group can hold: scalars, empty and complex ones, and those that several units share."""
    odd = {p for p in units.root.parameters() if p.dim() == 0 or p.numel() == 0 or p.is_complex()}
    owners: dict[nn.Parameter, set[int]] = {}
    inside: set[int] = set()
    for index, (_, unit) in enumerate(units.all()):
        inside.update(id(module) for module in unit.modules())
        for parameter in unit.parameters():
            owners.setdefault(parameter, set()).add(index)
    for module in units.root.modules():
        if id(module) not in inside:
            for parameter in module.parameters(recurse=False):
                owners.setdefault(parameter, set()).add(-1)
    shared = {parameter for parameter, indices in owners.items() if len(indices) > 1}
    return {p for p in odd | shared if not isinstance(p, DTensor)}


def _require_shardable(unit: nn.Module, whole: set[nn.Parameter], name: str) -> None:
    """Raise ValueError for a quantised weight that its quantiser gives no way to shard."""
    for key, parameter in unit.named_parameters():
        if parameter not in whole and is_packed(parameter) and not hasattr(parameter, "fsdp_pre_all_gather"):
            raise ValueError(
                f"{key} in {name} is a {type(parameter).__name__}, which cannot be sharded: it has no "
                "fsdp_pre_all_gather. Keep the frozen base whole (resident_blocks with all blocks, or "
                "TunedDDPStrategy), or quantise to a type that shards, such as torchao's NF4."
            )


def kept_whole(unit: nn.Module, plan: Plan, precision: Precision, *, resident: bool) -> set[nn.Parameter]:
    """Which parameters of a unit no rank shards.

    The frozen ones of a resident unit: they never change, so a copy on every rank is exact and costs no
    traffic. Everything that trains, when the plan replicates adapters. What trains in a resident unit
    otherwise stays sharded, with its gradients and optimizer state, and is gathered once a step. Norms that are to
    stay in FP32: a unit is gathered in one type.
    """
    replicate = plan.adapters == "replicated"
    wide = kept_wide(unit, precision)
    plain = [p for p in unit.parameters() if not isinstance(p, DTensor)]
    return {p for p in plain if p in wide or (replicate if p.requires_grad else resident)}


def mixed_precision_policy(precision: Precision) -> MixedPrecisionPolicy:
    """The one caster of a sharded module."""
    compute = to_dtype(precision.compute_dtype)
    if compute is None:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=to_dtype(precision.reduce_dtype))


def _root_policy(policy: MixedPrecisionPolicy, precision: Precision) -> MixedPrecisionPolicy:
    # Under "-mixed" what leaves a step is FP32, as it is under autocast.
    output = torch.float32 if precision.compute_dtype and not precision.frozen_dtype else None
    return MixedPrecisionPolicy(param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype, output_dtype=output)


def _placement(num_shards: int) -> Callable[[nn.Parameter], Shard | None]:
    """Split a matrix with fewer rows than ranks (``lora_A``) along its columns where they divide evenly.

    Along its rows most ranks would hold padding: an r=16 adapter on 512 ranks would travel as 512 rows.
    """

    def place(parameter: nn.Parameter) -> Shard | None:
        rows = parameter.shape[0]
        if isinstance(parameter, DTensor):
            return None  # split by tensor parallelism already
        if parameter.dim() >= 2 and rows % num_shards and parameter.shape[1] % num_shards == 0:
            return Shard(1)
        return None

    return place


def _open_root(root: nn.Module, compute_dtype: torch.dtype | None, forward_methods: tuple[str, ...]) -> list[Any]:
    """Let every way of computing with the root's own weights find them gathered.

    The step methods count as its forward. A layer that belongs to the root's group may also be called on
    its own (``generate``, ``encode``, a hook, the second loss of manual optimization): it gathers the
    root's group first when that is sharded, and casts its inputs as FSDP does for a unit.
    """
    assert isinstance(root, FSDPModule)
    handles: list[Any] = []
    for method in (*STEP_METHODS, *forward_methods):
        if hasattr(root, method):
            handles.append(_Method(root, method))
            register_fsdp_forward_method(root, method)

    def before(layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if any(isinstance(p, DTensor) for p in layer.parameters(recurse=False)):
            root.unshard()
        return cast_tensors(args, compute_dtype), cast_tensors(kwargs, compute_dtype)

    for layer in _root_layers(root):
        handles.append(layer.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
    fsdp_root_init(root)
    for module in root.modules():
        if hasattr(type(module), "_no_split_modules"):
            # Transformers then runs every layer on every rank (layer drop) and generates until all ranks are done.
            module._is_fsdp_managed_module = True  # type: ignore[assignment]
    return handles


class _Method:
    """A method of the root about to be replaced; ``remove()`` gives back what stood there."""

    def __init__(self, root: nn.Module, name: str) -> None:
        self._root, self._name = root, name
        self._before = root.__dict__.get(name)

    def remove(self) -> None:
        self._root.__dict__.pop(self._name, None)
        if self._before is not None:
            self._root.__dict__[self._name] = self._before


def _root_layers(module: nn.Module) -> list[nn.Module]:
    layers = []
    for child in module.children():
        if isinstance(child, FSDPModule):
            continue
        if any(True for _ in child.parameters(recurse=False)):
            layers.append(child)
        layers += _root_layers(child)
    return layers


def reshard_all(root: nn.Module) -> None:
    """Free every gathered unit, so that parameters are the shards that optimizers and state dicts know."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def allocate_outside_inference_mode(root: nn.Module) -> None:
    """Gather every unit once, so that no buffer of FSDP is born as an inference tensor.

    ``Trainer.validate`` runs under ``torch.inference_mode`` on NCCL; gather buffers first made there could
    never be written in a later ``fit``.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()
