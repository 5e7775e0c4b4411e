"""What lives through the whole step: weights, gradients, optimizer state, buffers."""

from lightning_shard.memory.moments import Moment
from lightning_shard.memory.situation import Situation

_BLOCKS_DONE = (Moment.BOTTOM_REDUCE, Moment.EMBEDDING)


def frozen_weights(s: Situation, moment: Moment) -> int:
    """Frozen weights at rest: their shard, uneven rows rounded up, in the frozen dtype."""
    return 0 if s.offloaded else s.total("frozen_bytes")


def trained_weights(s: Situation, moment: Moment) -> int:
    """What trains, at rest, in its master dtype (FP32)."""
    return 0 if s.offloaded else s.total("trained_bytes")


def optimizer_state(s: Situation, moment: Moment) -> int:
    """The optimizer's tensors for what trains: AdamW two FP32 moments, 8 bytes per trained parameter.

    A factored optimizer keeps a row and a column statistic of each matrix instead.
    """
    if s.updates_on_host:
        return 0
    if not s.optimizer.factored:
        return s.optimizer.num_moments * s.total("trained_bytes")
    return sum(
        group.count * sum(shape) * s.master_bytes
        for group in s.groups
        for tensor in group.unit.tensors
        if tensor.trainable
        for shape in [tensor.shape if len(tensor.shape) > 1 else tensor.shape[:1]]
    )


def gradients(s: Situation, moment: Moment) -> int:
    """Reduced gradients, in the master dtype, of what backward has passed so far.

    While accumulating they are there all the time, and so is the last step's in a forward where they are
    cleared only before the backward. Whole ones wait elsewhere where their reduction is deferred.
    """
    if s.offloaded:
        return 0
    everything = s.master_bytes * s.total("trained_numel")
    if s.buckets:
        return _beside_buckets(s, everything, moment)
    if moment is Moment.OPTIMIZER:
        return everything
    late = s.train.gradients_cleared == "before_backward" and moment in (Moment.GATHER, Moment.FORWARD_END)
    if s.train.accumulate > 1 and not s.defers or (late and s.train.accumulate == 1):
        return everything
    if moment in (Moment.GATHER, Moment.FORWARD_END, Moment.LOSS, Moment.HEAD):
        return 0
    return s.master_bytes * _reduced_numel(s, moment)


def _beside_buckets(s: Situation, everything: int, moment: Moment) -> int:
    """Gradients are views of the buffers. Cleared to None, torch's DDP makes the next ones anew until they have been
    reduced, so while accumulating both are there; flat buffers are lent to them at once.
    """
    return everything if s.torch_ddp and s.train.accumulate > 1 and moment is not Moment.OPTIMIZER else 0


def _reduced_numel(s: Situation, moment: Moment) -> int:
    """Elements whose gradients are there, the group being reduced included."""
    done = s.total("trained_numel", "head")
    if moment is Moment.TOP_REDUCE:
        done += s.one("trained_numel", "block")
    if moment in (Moment.BLOCK_END, Moment.BOTTOM):  # all but the first block's own
        done += s.total("trained_numel", "block") - s.one("trained_numel", "block")
        done -= s.one("trained_numel", "block") if moment is Moment.BOTTOM and s.before_last else 0
    if moment in _BLOCKS_DONE:
        done += s.total("trained_numel", "block")
    if moment is Moment.EMBEDDING:
        done += max(s.total("trained_numel", "embedding"), s.total("trained_numel", "root"))
    return done


def deferred_gradients(s: Situation, moment: Moment) -> int:
    """Whole gradients held in the reduce dtype while accumulating without reducing (``defer_gradient_sync``)."""
    if not s.defers or moment is Moment.OPTIMIZER:
        return 0
    return s.reduce_bytes * s.total("whole_numel")


def ddp_buckets(s: Situation, moment: Moment) -> int:
    """DDP's buckets: as large as all gradients, kept through the step; reduced gradients are views of them."""
    return s.master_bytes * s.total("trained_numel") if s.torch_ddp else 0


def flat_gradients(s: Situation, moment: Moment) -> int:
    """Gradients of what trains outside shard groups and DDP's buckets: one buffer, kept, that is reduced as it is."""
    replicated = s.total("trained_numel") if s.buckets and not s.torch_ddp else 0
    return s.master_bytes * (s.total("flat_numel") + replicated)


def buffers(s: Situation, moment: Moment) -> int:
    """The module's buffers and the batch (ids, labels, mask: three 8-byte numbers per token)."""
    return s.model.buffers_bytes + 24 * s.train.tokens


def optimizer_step(s: Situation, moment: Moment) -> int:
    """Temporaries of a foreach step: AdamW's list of denominators, as large as what trains; fused has none."""
    if moment is not Moment.OPTIMIZER or s.updates_on_host:
        return 0
    if s.train.optimizer_implementation == "fused":
        return 0
    if s.train.optimizer_implementation == "loop":
        return s.optimizer.foreach_temporaries * s.master_bytes * max(g.largest_trained_numel for g in s.groups)
    return s.optimizer.foreach_temporaries * s.total("trained_bytes")
