"""Bytes per device, term by term, at each moment of a step; the peak is the fullest moment."""

from lightning_shard.memory.estimate import Estimate, estimate_memory, floor_bytes, measure
from lightning_shard.memory.moments import Moment
from lightning_shard.memory.situation import Situation
from lightning_shard.memory.terms import OVERHEADS, TERMS

__all__ = ["OVERHEADS", "TERMS", "Estimate", "Moment", "Situation", "estimate_memory", "floor_bytes", "measure"]
