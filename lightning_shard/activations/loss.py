"""The end of the model: last norm, logits and cross-entropy."""

from dataclasses import dataclass

from lightning_shard.activations.block import NORM_GRADIENTS, num_tokens
from lightning_shard.specs import ModelSpec, TrainSpec, dtype_bytes

CHUNK_TOKENS = 1024
"""Tokens whose logits exist at a time under a chunked loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossActivations:
    """Bytes of the end of the model for one micro-batch."""

    kept_bytes: int
    """The last norm's activations and the head's input, kept until the head's backward."""
    forward_bytes: int
    """Logits at the end of forward: in the compute dtype, in FP32, and their log-softmax."""
    backward_bytes: int
    """At the start of backward: log-softmax and two FP32 gradients of it, 12 V per token."""
    num_logits: int
    """Logits that exist at a time."""
    logits_gradient_bytes: int
    """The logits' gradient while the head's backward runs."""
    norm_bytes: int = 0
    """In the last norm's backward: its input and the gradients on the way (see :mod:`activations.block`)."""


def loss_activations(model: ModelSpec, train: TrainSpec, parts: int = 1) -> LossActivations:
    """Logits and cross-entropy.

    In FP32: (c + 4 + 4) V per token at the end of forward (no second copy where c is 4) and 12 V at the start
    of backward: log-softmax 4, gradient of the picked entries 4, gradient of the log-softmax 4.
    A chunked loss takes the gradients while it has a chunk's logits, so that a head that trains has its whole gradient
    in FP32, and one chunk's part of it, at the end of forward already.
    Of a head in ``parts`` (tensor parallelism) a chunked loss has one part of the logits. The others join them: the part,
    the parts as they arrive and the joined copy are there together, and the head's backward starts from the part again.
    """
    arch = model.architecture
    if arch is None or not arch.vocab:
        return LossActivations(kept_bytes=0, forward_bytes=0, backward_bytes=0, num_logits=0, logits_gradient_bytes=0)
    c = dtype_bytes(train.precision_row.compute_dtype or "float32")
    tokens = num_tokens(model, train)
    rows = min(tokens, CHUNK_TOKENS) if train.loss == "chunked" else tokens
    forward, backward, gradient = _bytes_per_entry(train.loss, c, parts)
    softcap = c if arch.logit_softcap else 0
    columns = arch.vocab // parts
    num_logits = rows * (columns if train.loss == "chunked" else arch.vocab)
    joining = (2 * arch.vocab + columns) * c * rows if parts > 1 and train.loss != "chunked" else 0
    kept = (gradient - c) * num_logits  # beside the logits' own gradient
    return LossActivations(
        kept_bytes=_tail(model, c) * tokens,
        forward_bytes=max((forward + softcap) * num_logits + _head_gradient(model, train, c) // parts, joining),
        backward_bytes=(backward + softcap) * num_logits,
        num_logits=num_logits,
        logits_gradient_bytes=kept + c * columns * rows,
        norm_bytes=(c + 4 + 4 * NORM_GRADIENTS) * arch.hidden * tokens if arch.norm.startswith("rms") else 0,
    )


def _head_gradient(model: ModelSpec, train: TrainSpec, c: int) -> int:
    arch = model.architecture
    assert arch is not None
    return (4 + c) * arch.vocab * arch.hidden if train.loss == "chunked" and _head_trains(model) else 0


def _head_trains(model: ModelSpec) -> bool:
    return any(t.trainable for unit, t in model.tensors() if unit.kind == "head" or "embed" in unit.kind)


def _bytes_per_entry(loss: str, c: int, parts: int) -> tuple[int, int, int]:
    """Bytes per logit at the end of forward, at the start of backward, and in the head's backward.

    A loss of the parts (:meth:`lightning_shard.parallelize.vocabulary.SplitHead.loss`) has no log-softmax: beside the
    logits in FP32 their exponentials, for the sum forward and as the gradient backward.
    """
    wide = c if loss == "narrow" else 4
    if loss == "chunked" and parts > 1:
        return 2 * wide, 2 * wide, c
    cast = 0 if wide == c else wide
    copied = wide if loss == "shifted" else 0
    kept = wide if loss == "kept" else 0
    return c + cast + copied + wide, 3 * wide + kept, c + kept


def _tail(model: ModelSpec, c: int) -> int:
    """Bytes per token of the last norm (its FP32 input, its operand) and of the head's input."""
    arch = model.architecture
    assert arch is not None
    head_trains = _head_trains(model)
    norm_trains = any(t.trainable for unit, t in model.tensors() if unit.kind == "root" and len(t.shape) == 1)
    norm_input = 4 if arch.norm != "layer" else c
    return arch.hidden * (norm_input + (c if norm_trains and arch.norm != "layer" else 0) + (c if head_trains else 0))
