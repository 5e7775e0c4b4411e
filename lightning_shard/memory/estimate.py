"""The estimate of one plan: the fullest moment, its terms, and what was not modelled."""

from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_shard.hardware import Cluster
from lightning_shard.memory import states
from lightning_shard.memory.moments import Moment
from lightning_shard.memory.situation import Situation, make_situation
from lightning_shard.memory.terms import OVERHEADS, TERMS
from lightning_shard.plans import Plan
from lightning_shard.specs import ModelSpec, TrainSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Bytes per device and seconds per step of one plan."""

    allocated_bytes: int
    """Peak of live tensors."""
    reserved_bytes: int
    """What the caching allocator holds for them."""
    device_bytes: int
    """That plus context and communication buffers: what the device must have."""
    peak_at: str
    """The moment of the peak."""
    terms: dict[str, int]
    """Bytes by term at the peak; they add up to ``device_bytes``."""
    load_peak_bytes: int
    """Peak while the weights are loaded."""
    load_device_bytes: int = 0
    """That plus context and communication buffers."""
    resume_peak_bytes: int = 0
    """Peak while a checkpoint is loaded into the laid-out model and its optimizer."""
    moments: dict[str, int] = field(default_factory=dict)
    """Allocated bytes at every moment."""
    step_s: float = 0.0
    """Seconds of one optimizer step."""
    compute_s: float = 0.0
    """Of which matrix products and attention."""
    comm_s: float = 0.0
    """Time of all collectives, hidden or not."""
    shard_comm_s: float = 0.0
    """Of which gathers and reductions of shards."""
    comm_bytes: int = 0
    """Bytes each device sends in one step."""
    comm_share: float = 0.0
    """Share of the step in which a device waits for collectives."""
    tokens_per_s: float = 0.0
    """Tokens per second of all devices together."""
    mfu: float = 0.0
    """Share of the device's peak that the model's own FLOPs reach."""
    method: Literal["analytic", "simulated"] = "analytic"
    not_modelled: tuple[str, ...] = ()
    """What the figures leave out or take coarsely."""

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        names = self.__dataclass_fields__
        values = {name: getattr(self, name) for name in names}
        return {**values, "not_modelled": list(self.not_modelled)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Estimate":
        """The estimate that :meth:`to_dict` wrote."""
        return cls(**{**values, "not_modelled": tuple(values["not_modelled"])})


def estimate_memory(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: Cluster) -> Estimate:
    """The memory of one plan, timing left at zero; :func:`lightning_shard.planner.estimate` gives both."""
    return measure(make_situation(model, train, plan, cluster))


def measure(situation: Situation) -> Estimate:
    """The fullest moment of a situation and its terms."""
    by_moment = {moment: _terms_at(situation, moment) for moment in Moment}
    totals = {moment: sum(terms.values()) for moment, terms in by_moment.items()}
    peak = max(totals, key=lambda moment: totals[moment])
    extra = {name: term(situation, peak) for name, term in OVERHEADS.items()}
    allocated = totals[peak]
    terms = {name: size for name, size in {**by_moment[peak], **extra}.items() if size}
    return Estimate(
        allocated_bytes=allocated,
        reserved_bytes=allocated + extra["allocator_slack"],
        device_bytes=sum(terms.values()),
        peak_at=peak.value,
        terms=terms,
        load_peak_bytes=load_peak(situation),
        load_device_bytes=load_peak(situation) + extra["device_context"] + extra["collective_buffers"],
        resume_peak_bytes=resume_peak(situation),
        moments={moment.value: total for moment, total in totals.items()},
        not_modelled=_not_modelled(situation),
    )


def load_peak(s: Situation) -> int:
    """Peak while loading: everything at rest, and one group whole in its stored dtype before it is cut."""
    rest = s.model.buffers_bytes + (0 if s.offloaded else s.total("frozen_bytes") + s.total("trained_bytes"))
    if not s.sharded:
        return rest
    return rest + max(group.stored_bytes for group in s.groups)


def resume_peak(s: Situation) -> int:
    """Peak while resuming: weights and optimizer state at rest, and beside shards the largest trained tensor whole,
    which comes from the file before it is cut.
    """
    whole = max((group.largest_trained_numel for group in s.groups), default=0) if s.sharded else 0
    return floor_bytes(s) + s.model.buffers_bytes + s.master_bytes * whole


def floor_bytes(s: Situation) -> int:
    """What no step can do without: weights and optimizer state. A measured peak below it is not of this training."""
    at_rest = (states.frozen_weights, states.trained_weights, states.optimizer_state)
    return sum(term(s, Moment.OPTIMIZER) for term in at_rest)


def _terms_at(situation: Situation, moment: Moment) -> dict[str, int]:
    return {name: term(situation, moment) for name, term in TERMS.items()}


def _not_modelled(s: Situation) -> tuple[str, ...]:
    notes = list(s.model.warnings)
    if any(not block.activations.exact for block in s.blocks) or not s.blocks:
        notes.append("activations are estimated from parameter shapes: no architecture facts for this model")
    if s.updates_on_host:
        notes.append("host memory for what is offloaded is not checked")
    if s.plan.compile:
        notes.append("compiled blocks: eager attention and routed experts are counted as without the compiler")
    if s.train.precision == "bf16-mixed" and not s.sharded:
        notes.append("autocast's own copies are counted as one compute copy of each weight")
    arch = s.model.architecture
    if arch is not None and arch.attention_softcap and s.train.attention != "eager":
        notes.append("attention scores are capped, which no fused kernel does: they are counted as eager attention's")
    if arch is not None and arch.experts:
        notes.append("tokens are taken as evenly routed over experts")
    return tuple(notes)
