"""What is gathered, copied, reduced and made on the way through a step."""

from lightning_shard.activations import BackwardPoint
from lightning_shard.memory.moments import Moment
from lightning_shard.memory.situation import Block, Situation, input_needs_gradient, uses_autocast


def gathered_weights(s: Situation, moment: Moment) -> int:
    """Whole groups present in the compute dtype.

    The root through both passes; the head until its gradients are reduced; the block at work; one all-gather
    buffer (what was gathered last in forward, what is prefetched in backward); and blocks kept in between. A
    group is freed just before its gradients are reduced.
    """
    if not s.sharded or moment is Moment.OPTIMIZER:
        return 0
    root, head = s.total("gathered_bytes", "root"), s.total("gathered_bytes", "head")
    block = s.one("gathered_bytes", "block")
    through = s.plan.dp_shard > 1  # a buffer; one shard is copied to its place
    keeps = s.plan.reshard_after_forward is False or _top_is_resident(s)
    ahead = s.plan.prefetch * block if through and not keeps else 0
    if moment is Moment.GATHER:  # the last block's buffer waits for this gather to be copied out
        buffers = (head or block) + (block if head else 0) if through else 0
        return root + (head or block) + buffers + _kept(s)
    if moment is Moment.FORWARD_END:
        return root + head + ((head or block) if through else 0) + _kept(s)
    if moment is Moment.LOSS:  # a head of its own is what prefetches the last block
        return root + head + (0 if head else ahead) + _kept(s)
    if moment is Moment.HEAD:
        return root + head + ahead + _kept(s)
    if moment is Moment.HEAD_REDUCE:
        return root + ahead + _kept(s)
    if moment is Moment.TOP:
        return root + max(block + ahead, _kept(s))
    if moment is Moment.TOP_REDUCE:
        return root + max(ahead, _kept(s) - block)
    if moment in (Moment.BLOCK_END, Moment.BOTTOM):
        prefetches = s.before_last if moment is Moment.BOTTOM else s.model.num_blocks > 1
        return root + block + (ahead if prefetches else 0)
    embedding = s.total("gathered_bytes", "embedding") if s.plan.reshard_after_forward is False else 0
    return root + embedding


def _top_is_resident(s: Situation) -> bool:
    return s.top is not None and s.top.group.resident


def _kept(s: Situation) -> int:
    """Blocks and embedding kept after their forward: whole, or over the ranks that share them meanwhile."""
    reshard = s.plan.reshard_after_forward
    kept = 0
    for group in s.groups:
        if group.kind in ("block", "embedding"):
            ranks = 1 if group.resident or reshard is False else 0 if reshard is True else reshard
            kept += group.count * group.gathered_bytes // ranks if ranks else 0
    return kept


def compute_copies(s: Situation, moment: Moment) -> int:
    """Casts of weights to the compute dtype where nothing is gathered: autograd keeps them until each layer's
    backward. The embedding's is dropped after its look-up; recomputing blocks make theirs again.
    """
    if moment in (Moment.EMBEDDING, Moment.OPTIMIZER):
        return 0
    c = s.compute_bytes
    one = c * s.one("copied_numel", "block")
    blocks = one if s.plan.activation_checkpoint != "none" else c * s.total("copied_numel", "block")
    head = c * s.total("copied_numel", "head", "root")
    recomputed = s.plan.activation_checkpoint != "none"
    if recomputed and moment in (Moment.GATHER, Moment.FORWARD_END) and uses_autocast(s.train, s.plan):
        return head + c * s.total("cached_numel", "block")  # autocast's own cache, until its region ends
    if moment in (Moment.GATHER, Moment.FORWARD_END, Moment.LOSS, Moment.HEAD):
        return head + (0 if recomputed else blocks)
    if moment in (Moment.HEAD_REDUCE, Moment.TOP):
        return blocks
    if moment is Moment.TOP_REDUCE:
        return max(0, blocks - one)
    return one if moment in (Moment.BLOCK_END, Moment.BOTTOM) else 0


def weight_gradients(s: Situation, moment: Moment) -> int:
    """Gradients in the compute dtype before they are reduced or accumulated.

    Of a sharded or cast group they stay until the group's backward is through, where a cast one is also made
    FP32 tensor by tensor; a plain parameter's goes at once. A tied table's stays from the head's backward to
    the embedding's.
    """
    c, held = s.compute_bytes, s.tied_bytes * s.tied_numel
    if moment in (Moment.GATHER, Moment.FORWARD_END, Moment.LOSS, Moment.OPTIMIZER):
        return 0
    if moment is Moment.HEAD:
        return held or c * s.one("largest_trained_numel", "head")
    if moment is Moment.HEAD_REDUCE:
        return held or _at_the_end(s, "head")
    if moment in (Moment.TOP, Moment.BOTTOM):
        return held + _fullest(s, moment)[1]
    if moment is Moment.EMBEDDING:
        return max(_at_the_end(s, "embedding"), _at_the_end(s, "root"), _tied_sum(s))
    return held + _at_the_end(s, "block")


def _tied_sum(s: Situation) -> int:
    """A tied table's two gradients and their sum, before they are reduced; the sum itself is the gradient where
    nothing else holds it.
    """
    reduced = s.reduce_bytes * s.one("whole_numel", "root") if s.sharded else 0
    is_gradient = not s.sharded and not s.buckets and s.tied_bytes == s.master_bytes
    return (2 if is_gradient else 3) * s.tied_bytes * s.tied_numel - reduced


def _at_the_end(s: Situation, kind: str) -> int:
    """Of a whole group whose backward is through: all its gradients, and the FP32 copy being made of one."""
    c, largest = s.compute_bytes, s.one("largest_trained_numel", kind)
    if not s.waits:
        return c * largest if s.buckets else 0
    cast = s.master_bytes * largest if s.casts and s.buckets else 0
    return c * s.one("whole_numel", kind) + cast


def _fullest(s: Situation, moment: Moment) -> tuple[int, int]:
    """Gradients of activations and of weights at the fullest point of a block's backward. Both may be bounded by
    another point: a product's weight gradient, or the norm that comes after the MLP's are all made.
    """
    block = s.top if moment is Moment.TOP else s.bottom
    if block is None:
        return 0, s.compute_bytes * s.one("largest_trained_numel", "block") if s.waits else 0
    points = (
        (point.gradient_bytes, s.compute_bytes * (point.made_numel if s.waits else point.making_numel))
        for point in _points(block)
    )
    return max(points, key=sum)


def _points(block: Block) -> tuple[BackwardPoint, ...]:
    """The points of a block's backward; where it recomputes, the end of that is one."""
    if not block.recomputing:
        return block.activations.points
    return (*block.activations.points, BackwardPoint(gradient_bytes=block.activations.remade_bytes))


def reduce_buffers(s: Situation, moment: Moment) -> int:
    """Input of a reduce-scatter, in the reduce dtype, of a whole group; it lives until the next one starts."""
    if not s.sharded:
        return 0
    alive = {
        Moment.HEAD_REDUCE: ("head",),
        Moment.TOP: ("head",),
        Moment.TOP_REDUCE: ("block",),
        Moment.BLOCK_END: ("block",),
        Moment.BOTTOM: ("block",),
        Moment.BOTTOM_REDUCE: ("block",),
        Moment.EMBEDDING: ("embedding", "root"),
    }
    return s.reduce_bytes * max((s.one("whole_numel", kind) for kind in alive.get(moment, ())), default=0)


def activations(s: Situation, moment: Moment) -> int:
    """What blocks keep for backward, and the end of the model; a recomputing block keeps only its input (and its
    expensive results under the selective policy), and all of its activations while its backward runs.
    """
    total = sum(_run(block.group.count, block.recomputing, block) - block.unneeded_bytes for block in s.blocks)
    tail = s.loss.kept_bytes
    if moment is Moment.GATHER:  # of the head, or where that is the root's, of the last block
        return total if s.one("gathered_bytes", "head") or not s.top else total - _last(s.top)
    if moment in (Moment.FORWARD_END, Moment.LOSS, Moment.HEAD):
        return total + tail
    if moment is Moment.HEAD_REDUCE:
        return total
    if moment is Moment.TOP and s.top:
        if s.top.recomputing < s.top.group.count:
            return total
        # Recomputing takes what the selective policy kept, so that of this block it is not there twice.
        return total - s.top.recomputing_bytes + _remade(s, s.top)
    if moment is Moment.TOP_REDUCE and s.top:
        return total - _last(s.top)
    if moment is Moment.BLOCK_END and s.bottom:
        return _run(1, int(s.bottom.recomputing > 0), s.bottom)
    if moment is Moment.BOTTOM and s.bottom:
        kept = _remade(s, s.bottom) if s.bottom.recomputing else s.bottom.activations.kept_bytes
        return kept + (_run(1, int(s.bottom.recomputing > 0), s.bottom) if s.before_last else 0)
    return 0


def _run(count: int, recomputing: int, block: Block) -> int:
    return (count - recomputing) * block.activations.kept_bytes + recomputing * block.recomputing_bytes


def _remade(s: Situation, block: Block) -> int:
    """What a block holds that has recomputed: its input once, and under the selective policy what was left over."""
    own = block.activations
    left_over = own.untaken_bytes if s.plan.activation_checkpoint == "selective" else 0
    return own.input_bytes + own.kept_bytes - own.own_input_bytes + left_over


def _last(block: Block) -> int:
    """What the last block of a run keeps."""
    return _run(1, int(block.recomputing == block.group.count), block)


def activation_gradients(s: Situation, moment: Moment) -> int:
    """Gradients of activations at the heaviest point of the layer at work."""
    if moment in (Moment.TOP, Moment.BOTTOM):
        return _fullest(s, moment)[0]
    stream = s.top.activations.input_bytes if s.top else 0
    if moment is Moment.HEAD_REDUCE:  # or, the head's gradients gone, the last norm's backward
        going = 0 if s.tied_numel else weight_gradients(s, moment)
        return max(stream, s.loss.norm_bytes - going)
    if moment in (Moment.TOP_REDUCE, Moment.BLOCK_END, Moment.BOTTOM_REDUCE):
        return stream
    if moment is Moment.EMBEDDING:  # split over ranks, a copy with the others' tokens masked out
        return 2 * stream if s.splits_embedding and input_needs_gradient(s.model) else stream
    return 0


def logits_and_loss(s: Situation, moment: Moment) -> int:
    """Logits, their FP32 copy, log-softmax and gradients: 12 bytes per vocabulary entry and token at most."""
    if moment is Moment.FORWARD_END:
        return s.loss.forward_bytes
    if moment is Moment.LOSS:
        return s.loss.backward_bytes
    return s.loss.logits_gradient_bytes if moment is Moment.HEAD else 0
