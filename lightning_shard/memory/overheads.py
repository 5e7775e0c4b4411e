"""What a device holds beyond live tensors. Each is a term of its own, added, never a factor."""

from lightning_shard.memory.moments import Moment
from lightning_shard.memory.situation import Situation
from lightning_shard.memory.slack import (
    OPEN_SEGMENTS_BYTES,
    freed_before_update,
    held_by_sharding,
    held_for_loss,
    unplaced,
    update_temporaries,
)

MIB = 2**20
CONTEXT_BYTES = 1715 * MIB
"""CUDA context, kernels and libraries: nvidia-smi less the replayed reserved bytes of three single-GPU A100
runs of fms-acceleration (1714, 1718 and 1718 MiB)."""
COLLECTIVE_BYTES = 1024 * MIB
"""NCCL's channel buffers and peer mappings: a planning value, not yet measured here."""


def allocator_slack(s: Situation, peak: Moment) -> int:
    """What the caching allocator holds and no tensor uses at the peak (see :mod:`lightning_shard.memory.slack`).

    One open segment of each size, the pools of other streams, and blocks that are too small for what came later.
    Workspaces that libraries take from the allocator are in :data:`CONTEXT_BYTES`, which was measured with them. What forward and backward left is compared with what a foreach step needs: the larger of
    both moments counts.
    """
    if s.cluster.accelerator == "cpu":
        return 0
    base = OPEN_SEGMENTS_BYTES + held_by_sharding(s, peak)
    at_peak = base + (0 if peak is Moment.OPTIMIZER else held_for_loss(s))
    freed, wanted = freed_before_update(s), update_temporaries(s)
    at_update = base + sum(freed) + unplaced(wanted, freed) - sum(wanted) - _above_update(s, peak)
    return max(at_peak, at_update)


def _above_update(s: Situation, peak: Moment) -> int:
    """How much more is live at the peak than at the update."""
    from lightning_shard.memory.terms import TERMS

    live = {moment: sum(term(s, moment) for term in TERMS.values()) for moment in (peak, Moment.OPTIMIZER)}
    return live[peak] - live[Moment.OPTIMIZER]


def device_context(s: Situation, peak: Moment) -> int:
    """Context and loaded kernels of an accelerator. A host's capacity is what processes may use beyond themselves."""
    return 0 if s.cluster.accelerator == "cpu" else CONTEXT_BYTES


def collective_buffers(s: Situation, peak: Moment) -> int:
    """The collective library's own buffers, with more than one rank on accelerators."""
    return COLLECTIVE_BYTES if s.plan.world_size > 1 and s.cluster.accelerator == "gpu" else 0
