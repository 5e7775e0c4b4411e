"""What a simulated step says: bytes by kind and moment, collectives, and what was not modelled."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from lightning_shard.plans import Plan

KINDS = (
    "frozen_weights",
    "trained_weights",
    "buffers",
    "batch",
    "optimizer_state",
    "gradients",
    "ddp_buckets",
    "flat_gradients",
    "compute_copies",
    "gathered_weights",
    "gather_buffers",
    "reduce_buffers",
    "activations",
    "backward",
    "optimizer_step",
)
"""Kinds of live tensors. ``gathered_weights`` are whole groups, ``gather_buffers`` what an all-gather fills
before it is copied out; ``activations`` are made in forward (logits and loss included), ``backward`` in
backward (gradients of activations and of weights, recomputed activations)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """All calls of one kind in one optimizer step."""

    kind: str
    count: int
    num_bytes: int
    """The whole, gathered side of each call, summed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MomentPeak:
    """The fullest point of one moment of the step."""

    name: str
    allocated_bytes: int
    kinds: dict[str, int]
    """Bytes by kind at that point; they add up to :attr:`allocated_bytes`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """One optimizer step of a plan on the rank with the largest shards, as the fake run counted it."""

    plan: Plan
    allocated_bytes: int
    """Peak of live tensors, each rounded up to the allocator's 512 bytes."""
    peak_at: str
    """The moment of the peak."""
    kinds: dict[str, int]
    """Bytes by kind at the peak."""
    moments: tuple[MomentPeak, ...]
    """The fullest point of every moment, in the order of the step."""
    reserved_bytes: int
    """Peak of what the caching allocator holds for them."""
    device_bytes: int
    """That plus context and communication buffers."""
    collectives: tuple[Collective, ...]
    """What is sent in one optimizer step, all micro-batches included."""
    guessed_branches: int = 0
    """Values the code asked for that fake tensors do not have: answered True, 1 or "all of them"."""
    not_modelled: tuple[str, ...] = ()
    """What the figures leave out."""
    depths: tuple[int, ...] = ()
    """Numbers of blocks that were run where the result is extrapolated; empty for a run of all blocks."""
    num_blocks: int = 0
    """Blocks of the model the figures are for."""
    wall_s: float = 0.0
    """Seconds the simulation took."""

    @property
    def comm_bytes(self) -> int:
        """Bytes of all collectives of one step, gathered sides."""
        return sum(collective.num_bytes for collective in self.collectives)

    def count(self, kind: str) -> int:
        """How many collectives of a kind there were."""
        return sum(collective.count for collective in self.collectives if collective.kind == kind)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        names = [field.name for field in dataclasses.fields(self)]
        values = {name: getattr(self, name) for name in names}
        values["plan"] = self.plan.to_dict()
        for name in ("moments", "collectives"):
            values[name] = [dataclasses.asdict(each) for each in values[name]]
        return {**values, "not_modelled": list(self.not_modelled), "depths": list(self.depths)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Simulation":
        """The simulation that :meth:`to_dict` wrote."""
        return cls(
            **{
                **values,
                "plan": Plan.from_dict(values["plan"]),
                "moments": tuple(MomentPeak(**each) for each in values["moments"]),
                "collectives": tuple(Collective(**each) for each in values["collectives"]),
                "not_modelled": tuple(values["not_modelled"]),
                "depths": tuple(values["depths"]),
            }
        )
