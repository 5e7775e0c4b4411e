"""What the caching allocator holds beyond live tensors, by size: which freed tensors later ones can reuse.

The allocator serves a tensor from the smallest free block that is large enough and cuts off the rest; a block
that is too small stays, unused. Streams have pools of their own. Near the end of a device it gives free blocks
back and tries again, so this is what it holds while there is room.
"""

import bisect

from lightning_shard.memory.moments import Moment
from lightning_shard.memory.situation import Situation
from lightning_shard.memory.transit import reduce_buffers

MIB = 2**20
OPEN_SEGMENTS_BYTES = 22 * MIB
"""One open segment of each size: 2 MiB for tensors below 1 MiB, 20 MiB for those below 10 MiB."""


def held_for_loss(s: Situation) -> int:
    """Narrow logits are freed before backward, but their block is too small for the FP32 gradients that follow."""
    if s.compute_bytes >= 4 or s.train.loss == "narrow":
        return 0
    return s.compute_bytes * s.loss.num_logits


def held_by_sharding(s: Situation, peak: Moment) -> int:
    """What gathers, their copies and reductions leave when the peak comes at another moment.

    Gather and reduce streams have pools of their own. On the compute stream the copied-out weights of a block
    and the embedding, and the gradients of a block and the head, are cut into tensors that little else fits.
    """
    if not s.sharded:
        return 0
    block, head = s.one("gathered_bytes", "block"), s.one("gathered_bytes", "head")
    embedding = s.one("gathered_bytes", "embedding")
    gather_pool = max((head or block) + block, embedding)
    gather_alive = {Moment.GATHER: gather_pool, Moment.FORWARD_END: head or block}.get(peak, 0)
    if peak in (Moment.TOP, Moment.BLOCK_END, Moment.BOTTOM):
        gather_alive, block = block, 0
    reduce_pool = max(reduce_buffers(s, moment) for moment in Moment) - reduce_buffers(s, peak)
    gradients = s.compute_bytes * (s.one("whole_numel", "block") + s.one("whole_numel", "head"))
    return max(0, gather_pool - gather_alive) + block + embedding + reduce_pool + gradients


def unplaced(wanted: list[int], free: list[int]) -> int:
    """Bytes of the wanted tensors that no free block holds, largest first into the smallest block that does."""
    if sum(wanted) <= max(free, default=0):
        return 0  # one block could hold them all
    free = sorted(free)
    missing = 0
    for size in sorted(wanted, reverse=True):
        at = bisect.bisect_left(free, size)
        if at == len(free):
            missing += size
            continue
        rest = free.pop(at) - size
        if rest > MIB:
            bisect.insort(free, rest)
    return missing


def freed_before_update(s: Situation) -> list[int]:
    """Sizes of what forward and backward leave behind: activations, casts of weights, logits and their gradients.

    A block that recomputes leaves what its forward had; more than that is made in backward, where the loss was.
    """
    c, sizes = s.compute_bytes, []
    for block in s.blocks:
        count = 1 if block.recomputing else block.group.count
        sizes += [size for size in block.activations.sizes for _ in range(count)]
        if block.recomputing and block.activations.overwritten_bytes:
            sizes.remove(block.activations.overwritten_bytes)
        sizes += [block.recomputing_bytes] * block.recomputing
        if s.casts and not s.sharded:
            sizes += [c * t.numel for t in block.group.unit.tensors if t.trainable for _ in range(count)]
    logits = s.loss.num_logits
    return [*sizes, c * logits, *[4 * logits] * 3] if logits else sizes


def update_temporaries(s: Situation) -> list[int]:
    """Sizes of a foreach step's temporaries: one per trained tensor, of its shard."""
    each = s.optimizer.foreach_temporaries
    if s.train.optimizer_implementation != "foreach" or not each or s.updates_on_host:
        return []  # such an update runs on the host
    shards = 1 if s.plan.adapters == "replicated" else s.plan.dp_shard
    sizes: list[int] = []
    for group in s.groups:
        for tensor in group.unit.tensors:
            if tensor.trainable:
                sizes += [s.master_bytes * -(-tensor.numel // shards)] * (group.count * each)
    return sizes
