"""Callbacks that watch a plan at work."""

from lightning_shard.callbacks.monitor import ShardMonitor

__all__ = ["ShardMonitor"]
