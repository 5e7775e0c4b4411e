"""A Plan meets a module: one technique per file, in the one order in which they work.

Every step relies on those before it. Types before sharding (a shard group has one type among what
trains), initialisation and agreement before sharding (a shard of the wrong start cannot be told from a
shard of the right one), casts after sharding (they read what FSDP gathered).
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_shard._compat.groups import new_group
from lightning_shard.parallelize.agree import agree_on_start
from lightning_shard.parallelize.cast import ComputeCast, ComputeTypes, cast_by_unit, places_of, require_castable
from lightning_shard.parallelize.compiling import compile_blocks
from lightning_shard.parallelize.flat import FlatGradients
from lightning_shard.parallelize.materialize import Materializer, agree_on_starts
from lightning_shard.parallelize.norms import compute_wide, kept_wide
from lightning_shard.parallelize.prefetch import has_streams, prefetch_lists
from lightning_shard.parallelize.recompute import checkpoint_activations, recomputing_blocks
from lightning_shard.parallelize.shard import shard
from lightning_shard.parallelize.storage import Storage, store, to_dtype
from lightning_shard.parallelize.streaming import find_places, require_same_files, stream_in
from lightning_shard.parallelize.tensor import TensorParallel
from lightning_shard.parallelize.units import Units, find_units
from lightning_shard.parallelize.unshard import Shards
from lightning_shard.plans import MIB, Plan, tuned_bucket_bytes
from lightning_shard.specs import Precision

UNSUPPORTED: tuple[tuple[str, Callable[[Plan], bool]], ...] = (
    ("adapters='replicated' with tp > 1", lambda plan: plan.tp > 1 and plan.adapters == "replicated"),
    ("resident_blocks with tp > 1", lambda plan: plan.tp > 1 and plan.resident_blocks not in (0, ())),
    ("offload='all' of a replicated plan", lambda plan: plan.offload == "all" and plan.strategy == "ddp"),
)


@dataclass
class Parallelized:
    """A module laid out by a Plan."""

    module: nn.Module
    plan: Plan
    precision: Precision
    units: Units
    root_cast: ComputeCast
    """The cast of everything outside the units: the step methods run inside it."""
    replicated: FlatGradients | None = None
    """Averages the gradients of what trains outside FSDP."""
    storage: Storage = field(default_factory=Storage)
    """In which type each parameter was loaded and computes."""
    sent_bytes: int = 0
    """What had to travel so that all ranks start alike."""
    hooks: list[Any] = field(default_factory=list)
    ahead: dict[Any, list[FSDPModule]] = field(default_factory=dict)
    """Which units each unit's forward gathers ahead, beyond what FSDP does by itself."""
    sharded_by_user: bool = False
    """Whether parts of it came sharded."""
    watch: Any = None
    """What the strategy has the ranks of a sharded module do alike."""

    @property
    def sharded(self) -> bool:
        """Whether FSDP holds the parameters."""
        return self.plan.strategy == "fsdp2"

    @contextmanager
    def between_micro_batches(self) -> Generator[None, None, None]:
        """Accumulate: no reduction of replicated gradients, and of sharded ones as the plan says.

        A plan that keeps blocks between forward and backward keeps them until the last micro-batch too. Between
        replicas of a sharded copy nothing travels before the last one: each shard adds up its own sum.
        """
        root = self.module
        if not isinstance(root, FSDPModule):
            with self.replicated.paused() if self.replicated else nullcontext():
                yield
            return
        root.set_requires_gradient_sync(not self.plan.defer_gradient_sync)
        root.set_requires_all_reduce(False)  # afterwards: the line above sets this switch too
        root.set_reshard_after_backward(self.plan.reshard_after_forward is not False)
        try:
            with self.replicated.paused() if self.replicated else nullcontext():
                yield
        finally:
            root.set_requires_all_reduce(True)
            root.set_requires_gradient_sync(True)
            root.set_reshard_after_backward(True)

    def undo(self) -> None:
        """Take off what :func:`parallelize` put on the module, save for its sharding, so that another plan can be applied."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []
        if self.replicated is not None:
            self.replicated.close()
        self.units.restore_forwards()


def parallelize(
    module: nn.Module,
    plan: Plan,
    *,
    precision: Precision,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    seed: int = 0,
    before: "Parallelized | None" = None,
    mesh_before: DeviceMesh | None = None,
    forward_methods: tuple[str, ...] = (),
) -> Parallelized:
    """Lay ``module`` out over ``mesh`` as ``plan`` says, in place.

    Args:
        module: the root, with its adapters already injected; on any device, meta included.
        plan: the layout. DDP's wrapper is not applied here: it belongs to the strategy.
        precision: in which types to store, compute and reduce.
        device: where this rank computes.
        mesh: axes ``dp_replicate``, ``dp_shard`` and ``tp``; needed when the plan shards.
        before: an earlier layout of the same module, which is taken off.
        mesh_before: where that one was sharded: a mesh of its shape, over process groups that are alive.
        seed: what meta tensors are initialised from.
        forward_methods: methods besides the step methods that compute with the root's own weights.

    Raises:
        ValueError: when the plan asks for what the engine does not do.
        RuntimeError: on all ranks when they built different modules.
    """
    require_supported(plan)
    if before is not None:
        before.undo()
    shards = Shards(module, mesh_before)
    units, by_user = find_units(module), is_sharded(module)
    storage = store(module, precision, None if before is None else before.storage, kept_wide(module, precision))
    opened: list[Any] = []
    materializer = Materializer(module, seed, stream=plan.tp == 1)  # tensor parallelism splits whole tensors
    waiting = find_places(module)
    require_same_files(waiting)
    sent_bytes = agree_on_start(module, device)
    agree_on_starts(module)
    uncovered, replicated = storage.compute_dtypes, None
    if plan.strategy == "fsdp2":
        assert mesh is not None
        tensor_parallel = TensorParallel(module, mesh["tp"]) if plan.tp > 1 else None

        def prepare(unit: nn.Module) -> None:
            shards.put_together(unit)
            materializer.materialize(unit)
            if tensor_parallel is not None:
                tensor_parallel.apply(unit)

        def load() -> None:
            stream_in(waiting, torch.device("cpu") if plan.offload == "all" else device)

        whole, opened = shard(units, plan, mesh, precision, prepare, forward_methods, load)
        for parameter in whole:
            parameter.data = parameter.data.to(device)
        replicated = average_gradients([p for p in module.parameters() if p in whole and p.requires_grad])
        if precision.compute_dtype is not None:
            uncovered = places_of(module, uncovered_by_policy(whole - kept_wide(module, precision), precision))
    else:
        shards.put_together(module)
        materializer.materialize(module)
        stream_in(waiting, device)
        module.to(device)
    input_dtype = to_dtype(precision.compute_dtype) if precision.frozen_dtype or replicated else None
    if plan.flat_gradients:
        replicated = FlatGradients(module.parameters(), chunk_bytes=bucket_bytes(module, plan))
    require_castable(uncovered, module)
    casts, hooks = cast_by_unit(units, uncovered, input_dtype, recomputing_blocks(units, plan))
    hooks += compute_wide(module, precision)
    checkpoint_activations(units, plan, {unit: cast for unit, cast in casts.items() if cast})
    if plan.compile:
        compile_blocks(units, plan)
    ahead = gathered_ahead(units, plan, mesh)
    return Parallelized(
        module, plan, precision, units, casts[module], replicated, storage, sent_bytes, hooks + opened, ahead, by_user
    )


def gathered_ahead(units: Units, plan: Plan, mesh: DeviceMesh | None) -> dict[Any, list[FSDPModule]]:
    """Which units each unit's forward gathers ahead."""
    if mesh is None:
        return {}
    return {unit: ahead for unit, ahead, _ in prefetch_lists(units, plan.prefetch, streams=has_streams(mesh))}


def average_gradients(parameters: list[nn.Parameter]) -> FlatGradients | None:
    """Flat reductions for replicated trainables; None when there are none.

    In a group of its own: its order of calls then need not agree with that of FSDP's gathers.
    """
    return FlatGradients(parameters, new_group()) if parameters else None


def bucket_bytes(module: nn.Module, plan: Plan) -> int:
    """Bytes of gradients per all-reduce of a replicated plan."""
    if plan.bucket_cap_mb is not None:
        return int(plan.bucket_cap_mb * MIB)
    trained = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    return tuned_bucket_bytes(trained, plan.world_size)


def uncovered_by_policy(whole: set[nn.Parameter], precision: Precision) -> ComputeTypes:
    """Which parameters of a sharded module compute in another type than they are stored in, and FSDP does not cast."""
    compute = to_dtype(precision.compute_dtype)
    assert compute is not None
    return {p: compute for p in whole if p.is_floating_point() and p.dtype.itemsize > compute.itemsize}


def require_supported(plan: Plan) -> None:
    """Raise ValueError when ``plan`` asks for what the engine does not do, rather than ignore it."""
    asked = [name for name, used in UNSUPPORTED if used(plan)]
    if asked:
        raise ValueError(
            f"The plan asks for {', '.join(asked)}, which this version does not carry out. Leave it at its default."
        )


def is_sharded(module: nn.Module) -> bool:
    """Whether any part of ``module`` is already sharded, by us or by the user."""
    return any(isinstance(m, FSDPModule) for m in module.modules())


def unsynced_parameters(layout: Parallelized) -> list[str]:
    """Trainable parameters that no gradient reduction covers: they would drift apart between ranks."""
    if not layout.sharded:
        return []
    covered = layout.replicated or ()
    return [
        name
        for name, p in layout.module.named_parameters()
        if p.requires_grad and not isinstance(p, DTensor) and p not in covered
    ]
