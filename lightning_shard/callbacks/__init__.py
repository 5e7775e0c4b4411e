"""Callbacks that watch a plan at work."""

from lightning_shard.callbacks.monitor import ShardMonitor
from lightning_shard.callbacks.overlap import OverlapReport

__all__ = ["OverlapReport", "ShardMonitor"]
