"""The answer: a plan, what it needs, and every plan that lost with the number that decided."""

from dataclasses import dataclass, field
from typing import Any

from lightning_shard.memory import Estimate
from lightning_shard.planner.checklist import Answer
from lightning_shard.plans import Plan

MOST_OF_CAPACITY = 0.95
"""Above this share of a device nothing is called a fit: the allocator starts to free and retry there."""


def usable_bytes(capacity_bytes: int, headroom: float) -> int:
    """Capacity less the headroom, and never above 95 % of it."""
    return int(capacity_bytes * min(1.0 - headroom, MOST_OF_CAPACITY))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejected:
    """A plan that was considered and not taken."""

    plan: Plan
    device_bytes: int
    step_s: float
    reason: str
    terms: dict[str, int] = field(default_factory=dict, compare=False)
    """Bytes by term at its peak, for pictures; not part of the JSON contract."""

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        return {
            "plan": self.plan.to_dict(),
            "device_bytes": self.device_bytes,
            "step_s": self.step_s,
            "reason": self.reason,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """The plan to take, what it needs, and every plan that lost with the number that decided."""

    plan: Plan
    estimate: Estimate
    capacity_bytes: int
    headroom: float
    fits: bool
    reason: str
    rejected: tuple[Rejected, ...] = ()
    shortfall_bytes: int = 0
    """What a device lacks for the plan; 0 where it fits."""
    advice: tuple[str, ...] = ()
    """What would help, each tried out."""
    checklist: tuple[Answer, ...] = ()
    """What a careful engineer would ask of the plan, answered."""

    @property
    def limit_bytes(self) -> int:
        """What a plan may use of a device."""
        return usable_bytes(self.capacity_bytes, self.headroom)

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract of ``lightning-shard plan``."""
        return {
            "decision": {"strategy": self.plan.strategy, "plan": self.plan.to_dict(), "reason": self.reason},
            "estimate": self.estimate.to_dict(),
            "capacity_bytes": self.capacity_bytes,
            "limit_bytes": self.limit_bytes,
            "headroom": self.headroom,
            "fits": self.fits,
            "shortfall_bytes": self.shortfall_bytes,
            "advice": list(self.advice),
            "checklist": [answer.to_dict() for answer in self.checklist],
            "rejected": [rejected.to_dict() for rejected in self.rejected],
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Decision":
        """The decision that :meth:`to_dict` wrote."""
        return cls(
            plan=Plan.from_dict(values["decision"]["plan"]),
            reason=values["decision"]["reason"],
            estimate=Estimate.from_dict(values["estimate"]),
            rejected=tuple(Rejected(**{**row, "plan": Plan.from_dict(row["plan"])}) for row in values["rejected"]),
            advice=tuple(values["advice"]),
            checklist=tuple(Answer(**answer) for answer in values.get("checklist", ())),
            **{key: values[key] for key in ("capacity_bytes", "headroom", "fits", "shortfall_bytes")},
        )
