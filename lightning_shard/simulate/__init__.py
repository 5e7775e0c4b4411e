"""A plan's real step on tensors without memory: exact bytes and collectives, without a GPU.

``simulate`` imports torch, Lightning and the engine when it is used, not before.
"""

import importlib
from typing import TYPE_CHECKING, Any

from lightning_shard.simulate.estimate import as_estimate, differences
from lightning_shard.simulate.result import Collective, MomentPeak, Simulation

if TYPE_CHECKING:
    from lightning_shard.simulate.apart import simulate_in_subprocess
    from lightning_shard.simulate.api import simulate

__all__ = [
    "Collective",
    "MomentPeak",
    "Simulation",
    "as_estimate",
    "differences",
    "simulate",
    "simulate_in_subprocess",
]

_FILES = {"simulate": "api", "simulate_in_subprocess": "apart"}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"lightning_shard.simulate has no attribute {name!r}. It has {', '.join(__all__)}.")
    return getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)
