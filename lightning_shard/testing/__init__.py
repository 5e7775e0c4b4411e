"""Helpers for authors of strategies: tests on several ranks, parity with one process, counted collectives."""

import importlib
from typing import TYPE_CHECKING, Any

from lightning_shard.testing.ranks import RankError, ranks, run_ranks

if TYPE_CHECKING:
    from lightning_shard.testing.collectives import Collectives, count_collectives
    from lightning_shard.testing.parity import GlobalBatchSampler, RunResult, assert_parity, run_trainer

__all__ = [
    "Collectives",
    "GlobalBatchSampler",
    "RankError",
    "RunResult",
    "assert_parity",
    "count_collectives",
    "ranks",
    "run_ranks",
    "run_trainer",
]

_FILES = {
    "Collectives": "collectives",
    "GlobalBatchSampler": "parity",
    "RunResult": "parity",
    "assert_parity": "parity",
    "count_collectives": "collectives",
    "run_trainer": "parity",
}
"""Names that need torch, loaded at first use: starting ranks needs none in the calling process."""


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"lightning_shard.testing has no attribute {name!r}. It has {', '.join(__all__)}.")
    return getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)
