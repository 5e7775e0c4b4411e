"""A plan's real step on tensors without memory: exact bytes and collectives, without a GPU.

``simulate`` imports torch, Lightning and the engine when it is called, not before.
"""

from typing import TYPE_CHECKING, Any

from lightning_shard.simulate.result import Collective, MomentPeak, Simulation

if TYPE_CHECKING:
    from lightning_shard.simulate.api import simulate

__all__ = ["Collective", "MomentPeak", "Simulation", "simulate"]


def __getattr__(name: str) -> Any:
    if name == "simulate":
        from lightning_shard.simulate.api import simulate

        return simulate
    raise AttributeError(f"lightning_shard.simulate has no attribute {name!r}. It has {', '.join(__all__)}.")
