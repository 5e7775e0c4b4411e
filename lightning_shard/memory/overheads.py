"""What a device holds beyond live tensors. Each is a term of its own, added, never a factor."""

from lightning_shard.memory.moments import Moment
from lightning_shard.memory.situation import Situation

MIB = 2**20
CONTEXT_BYTES = 1715 * MIB
"""CUDA context, kernels and libraries: nvidia-smi less the replayed reserved bytes of three single-GPU A100
runs of fms-acceleration (1714, 1718 and 1718 MiB)."""
COLLECTIVE_BYTES = 1024 * MIB
"""NCCL's channel buffers and peer mappings: a planning value, not yet measured here."""
WORKSPACE_BYTES = 32 * MIB
"""cuBLAS workspace of one handle and stream on Hopper (8 MiB before), which the caching allocator hands out."""
SMALL_POOL_BYTES = 2 * MIB
"""The allocator's segments: 2 MiB for tensors below 1 MiB, 20 MiB for those below 10 MiB, else rounded up to 2 MiB."""
LARGE_SEGMENT_BYTES = 20 * MIB


def allocator_slack(s: Situation, peak: Moment) -> int:
    """What the caching allocator holds and no tensor uses at the peak.

    One open segment of each size, and what collectives freed: the gather and reduce streams have pools of
    their own, and what was freed there cannot serve the compute stream. So the largest gather buffer and the
    largest reduction stay reserved when the peak comes at another moment.
    """
    if s.cluster.accelerator == "cpu":
        return 0
    slack = SMALL_POOL_BYTES + LARGE_SEGMENT_BYTES + WORKSPACE_BYTES
    if not s.sharded:
        return slack
    from lightning_shard.memory.transit import reduce_buffers

    reduce_pool = max(reduce_buffers(s, moment) for moment in Moment)
    gather_pool = max(s.one("gathered_bytes", kind) for kind in ("block", "head", "root", "embedding"))
    gather_alive = 0 if peak is Moment.OPTIMIZER else s.one("gathered_bytes", "block") * min(1, s.plan.prefetch)
    return slack + reduce_pool - reduce_buffers(s, peak) + max(0, gather_pool - gather_alive)


def device_context(s: Situation, peak: Moment) -> int:
    """Context and loaded kernels of an accelerator. A host's capacity is what processes may use beyond themselves."""
    return 0 if s.cluster.accelerator == "cpu" else CONTEXT_BYTES


def collective_buffers(s: Situation, peak: Moment) -> int:
    """The collective library's own buffers, with more than one rank on accelerators."""
    return COLLECTIVE_BYTES if s.plan.world_size > 1 and s.cluster.accelerator == "gpu" else 0
