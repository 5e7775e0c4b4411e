"""What is gathered, copied, reduced and made on the way through a step."""

from lightning_shard.memory.moments import Moment
from lightning_shard.memory.situation import Situation

_BEFORE_BLOCKS = (Moment.FORWARD_END, Moment.LOSS, Moment.HEAD, Moment.HEAD_REDUCE)
_FORWARD_OVER = (Moment.TOP, Moment.TOP_REDUCE, Moment.BOTTOM, Moment.BOTTOM_REDUCE, Moment.EMBEDDING)


def gathered_weights(s: Situation, moment: Moment) -> int:
    """Whole groups present in the compute dtype: the root, the head until its backward, the block that
    computes, one all-gather buffer (the last one gathered in forward, the prefetched one in backward), and
    the blocks kept between forward and backward.
    """
    if not s.sharded or moment is Moment.OPTIMIZER:
        return 0
    root, head = s.total("gathered_bytes", "root"), s.total("gathered_bytes", "head")
    block = s.one("gathered_bytes", "block")
    if moment is Moment.FORWARD_END:
        return root + head + (head or block) + _kept(s)
    if moment in _BEFORE_BLOCKS:
        return root + head + s.plan.prefetch * block + _kept(s)
    if moment in (Moment.TOP, Moment.TOP_REDUCE):
        return root + max(block * (1 + s.plan.prefetch), _kept(s))
    if moment in (Moment.BOTTOM, Moment.BOTTOM_REDUCE):
        return root + block + s.total("gathered_bytes", "embedding") * _keeps_all(s)
    return root


def _kept(s: Situation) -> int:
    """Blocks and embedding kept after their forward: whole, or over the ranks that share them meanwhile."""
    reshard = s.plan.reshard_after_forward
    if reshard is True:
        return 0
    return s.total("gathered_bytes", "block", "embedding") // (1 if reshard is False else reshard)


def _keeps_all(s: Situation) -> bool:
    return s.plan.reshard_after_forward is False


def compute_copies(s: Situation, moment: Moment) -> int:
    """Casts of FP32 masters to the compute dtype where nothing is gathered: autograd keeps them until each
    layer's backward. The embedding's is dropped after its look-up.
    """
    if s.sharded or moment is Moment.OPTIMIZER:
        return 0
    kinds = {"block"} if moment in _FORWARD_OVER else {"block", "head", "root"}
    copies = s.compute_bytes * s.total("copied_numel", *kinds)
    if moment in (Moment.BOTTOM, Moment.BOTTOM_REDUCE) or s.plan.activation_checkpoint != "none":
        return min(copies, s.compute_bytes * s.one("copied_numel", *kinds))
    return 0 if moment is Moment.EMBEDDING else copies


def weight_gradients(s: Situation, moment: Moment) -> int:
    """Gradients in the compute dtype before they are reduced or accumulated: of the layer at work, and of a
    whole group when it is about to be reduced.
    """
    whole = {
        Moment.HEAD_REDUCE: ("head",),
        Moment.TOP_REDUCE: ("block",),
        Moment.BOTTOM_REDUCE: ("block",),
        Moment.EMBEDDING: ("embedding", "root"),
    }
    layer = {Moment.HEAD: ("head",), Moment.TOP: ("block",), Moment.BOTTOM: ("block",), **whole}
    if s.sharded and moment in whole:
        return s.compute_bytes * max(s.one("whole_numel", kind) for kind in whole[moment])
    numel = max((s.one("largest_trained_numel", kind) for kind in layer.get(moment, ())), default=0)
    cast = s.master_bytes if not s.sharded and s.compute_bytes != s.master_bytes else 0
    return numel * (s.compute_bytes + cast)


def reduce_buffers(s: Situation, moment: Moment) -> int:
    """Input of a reduce-scatter, in the reduce dtype, of a whole group; it lives until the next one starts."""
    if not s.sharded:
        return 0
    alive = {
        Moment.HEAD_REDUCE: "head",
        Moment.TOP: "head",
        Moment.TOP_REDUCE: "block",
        Moment.BOTTOM: "block",
        Moment.BOTTOM_REDUCE: "block",
    }
    if moment is Moment.EMBEDDING:
        return s.reduce_bytes * max(s.one("whole_numel", "embedding"), s.one("whole_numel", "root"))
    return s.reduce_bytes * s.one("whole_numel", alive[moment]) if moment in alive else 0


def activations(s: Situation, moment: Moment) -> int:
    """What blocks keep for backward, and the end of the model; a recomputing block keeps only its input, and
    all of its activations while its backward runs.
    """
    total = sum(_run(block.group.count, block.recomputing, block) for block in s.blocks)
    tail = s.loss.kept_bytes
    if moment in (Moment.FORWARD_END, Moment.LOSS, Moment.HEAD):
        return total + tail
    if moment is Moment.HEAD_REDUCE:
        return total
    if moment is Moment.TOP and s.top:
        return total + (s.top.activations.kept_bytes if s.top.recomputing == s.top.group.count else 0)
    if moment is Moment.TOP_REDUCE and s.top:
        return total - _run(1, int(s.top.recomputing == s.top.group.count), s.top)
    if moment is Moment.BOTTOM and s.bottom:
        return s.bottom.activations.kept_bytes + (s.bottom.activations.input_bytes if s.bottom.recomputing else 0)
    return 0


def _run(count: int, recomputing: int, block: object) -> int:
    kept = block.activations  # type: ignore[attr-defined]
    return int((count - recomputing) * kept.kept_bytes + recomputing * kept.input_bytes)


def activation_gradients(s: Situation, moment: Moment) -> int:
    """Gradients of activations at the heaviest point of the layer at work."""
    if moment in (Moment.TOP, Moment.BOTTOM):
        block = s.top if moment is Moment.TOP else s.bottom
        return block.activations.gradient_bytes if block else 0
    if moment in (Moment.HEAD_REDUCE, Moment.TOP_REDUCE, Moment.BOTTOM_REDUCE, Moment.EMBEDDING):
        return s.top.activations.input_bytes if s.top else 0
    return 0


def logits_and_loss(s: Situation, moment: Moment) -> int:
    """Logits, their FP32 copy, log-softmax and gradients: 12 bytes per vocabulary entry and token at most."""
    if moment is Moment.FORWARD_END:
        return s.loss.forward_bytes
    if moment is Moment.LOSS:
        return s.loss.backward_bytes
    return s.loss.logits_gradient_bytes if moment is Moment.HEAD else 0
