"""Seconds of a step, term by term: enough to rank plans, not to promise throughput."""

from lightning_shard.timing.links import Ring, all_reduce_s, bandwidth, collective_s, ring_of
from lightning_shard.timing.step import KINDS, StepTime, Traffic, compute_flops, time_step
from lightning_shard.timing.tensor_parallel import Sums, tensor_gathers, tensor_sums

__all__ = [
    "KINDS",
    "Ring",
    "StepTime",
    "Sums",
    "Traffic",
    "all_reduce_s",
    "bandwidth",
    "collective_s",
    "compute_flops",
    "ring_of",
    "tensor_gathers",
    "tensor_sums",
    "time_step",
]
