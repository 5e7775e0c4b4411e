"""Looks for what would waste a run: before it, and after its first step.

Each finding says what is wrong, why it matters and how to mend it, and is the same on every rank.
"""

from typing import TYPE_CHECKING, Any

from lightning_shard.doctor.finding import DoctorError, Finding

if TYPE_CHECKING:
    from lightning_shard.doctor.callback import Doctor

__all__ = ["Doctor", "DoctorError", "Finding"]


def __getattr__(name: str) -> Any:
    """The callback at its first use: the machine part needs no Lightning."""
    if name == "Doctor":
        from lightning_shard.doctor.callback import Doctor

        return Doctor
    raise AttributeError(f"lightning_shard.doctor has no attribute {name!r}. It has {', '.join(__all__)}.")
