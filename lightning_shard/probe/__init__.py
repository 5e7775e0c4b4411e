"""Measure the collectives of the job's own ranks."""

from lightning_shard.probe.launch import probe
from lightning_shard.probe.measure import measure_links

__all__ = ["measure_links", "probe"]
