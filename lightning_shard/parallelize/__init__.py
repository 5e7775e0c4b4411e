"""A Plan meets a module: one technique per file, in the one order in which they work.

Every step relies on those before it. Types before sharding (a shard group has one type among what
trains), initialisation and agreement before sharding (a shard of the wrong start cannot be told from a
shard of the right one), casts after sharding (they read what FSDP gathered).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_shard.parallelize.agree import agree_on_start
from lightning_shard.parallelize.cast import ComputeCast, cast_by_unit
from lightning_shard.parallelize.materialize import Materializer
from lightning_shard.parallelize.shard import shard
from lightning_shard.parallelize.storage import store, to_dtype
from lightning_shard.parallelize.units import Units, find_units
from lightning_shard.plans import Plan
from lightning_shard.specs import Precision

UNSUPPORTED: tuple[tuple[str, Callable[[Plan], bool]], ...] = (
    ("tp > 1", lambda plan: plan.tp > 1),
    ("resident_blocks", lambda plan: plan.dp_shard > 1 and plan.resident_blocks not in (0, ())),
    ("adapters='replicated' beside sharded blocks", lambda plan: plan.dp_shard > 1 and plan.adapters == "replicated"),
    ("activation_checkpoint", lambda plan: plan.activation_checkpoint != "none"),
    ("offload", lambda plan: plan.offload != "none"),
    ("compile", lambda plan: plan.compile),
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
    sent_bytes: int = 0
    """What had to travel so that all ranks start alike."""
    hooks: list[Any] = field(default_factory=list)

    @property
    def sharded(self) -> bool:
        """Whether FSDP holds the parameters."""
        return self.plan.strategy == "fsdp2"

    def undo(self) -> None:
        """Take the hooks off a replicated module, so that another plan can be applied."""
        for hook in self.hooks:
            hook.remove()


def parallelize(
    module: nn.Module,
    plan: Plan,
    *,
    precision: Precision,
    device: torch.device,
    mesh: DeviceMesh | None = None,
    seed: int = 0,
    forward_methods: tuple[str, ...] = (),
) -> Parallelized:
    """Lay ``module`` out over ``mesh`` as ``plan`` says, in place.

    Args:
        module: the root, with its adapters already injected; on any device, meta included.
        plan: the layout. DDP's wrapper is not applied here: it belongs to the strategy.
        precision: in which types to store, compute and reduce.
        device: where this rank computes.
        mesh: axes ``dp_replicate`` and ``dp_shard``; needed when the plan shards.
        seed: what meta tensors are initialised from.
        forward_methods: methods besides the step methods that compute with the root's own weights.

    Raises:
        ValueError: when the plan asks for what the engine does not do.
        RuntimeError: on all ranks when they built different modules.
    """
    require_supported(plan)
    units = find_units(module)
    storage = store(module, precision)
    materializer = Materializer(module, seed)
    sent_bytes = agree_on_start(module, device)
    if plan.strategy == "fsdp2":
        assert mesh is not None
        shard(units, plan, mesh, precision, materializer.materialize, forward_methods)
    else:
        materializer.materialize(module)
        module.to(device)
    # FSDP's policy casts what it shards; left to us is what no policy covers.
    uncovered = {} if plan.strategy == "fsdp2" and precision.compute_dtype else storage.compute_dtypes
    input_dtype = to_dtype(precision.compute_dtype) if precision.frozen_dtype else None
    root_cast, hooks = cast_by_unit(units, uncovered, input_dtype)
    return Parallelized(module, plan, precision, units, root_cast, sent_bytes, hooks)


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


def unsynced_parameters(module: nn.Module, *, sharded: bool) -> list[str]:
    """Trainable parameters that no gradient reduction covers: they would drift apart between ranks."""
    if not sharded:
        return []
    return [name for name, p in module.named_parameters() if p.requires_grad and not isinstance(p, DTensor)]
