"""The end of the model: last norm, logits and cross-entropy."""

from dataclasses import dataclass

from lightning_shard.activations.block import num_tokens
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
    logits_gradient_bytes: int
    """The logits' gradient while the head's backward runs."""


def loss_activations(model: ModelSpec, train: TrainSpec) -> LossActivations:
    """Logits and loss as transformers computes them: upcast to FP32, then cross-entropy.

    Forward end (c + 4 + 4) V per token (no upcast copy where c is 4), backward start 12 V: log-softmax 4,
    gradient of the picked entries 4, gradient of the log-softmax 4.
    """
    arch = model.architecture
    if arch is None or not arch.vocab:
        return LossActivations(kept_bytes=0, forward_bytes=0, backward_bytes=0, logits_gradient_bytes=0)
    c = dtype_bytes(train.precision_row.compute_dtype or "float32")
    tokens = num_tokens(model, train)
    rows = tokens if train.loss == "full" else min(tokens, CHUNK_TOKENS)
    softcap = c * arch.vocab * rows if arch.logit_softcap else 0
    forward = (c + 4 + (4 if c != 4 else 0)) * arch.vocab * rows + softcap
    return LossActivations(
        kept_bytes=_tail(model, c) * tokens,
        forward_bytes=forward,
        backward_bytes=12 * arch.vocab * rows + softcap,
        logits_gradient_bytes=(c + (4 if c != 4 else 0)) * arch.vocab * rows,
    )


def _tail(model: ModelSpec, c: int) -> int:
    """Bytes per token of the last norm (its FP32 input, its operand) and of the head's input."""
    arch = model.architecture
    assert arch is not None
    head_trains = any(t.trainable for unit, t in model.tensors() if unit.kind == "head" or "embed" in unit.kind)
    norm_trains = any(t.trainable for unit, t in model.tensors() if unit.kind == "root" and len(t.shape) == 1)
    norm_input = 4 if arch.norm != "layer" else c
    return arch.hidden * (norm_input + (c if norm_trains and arch.norm != "layer" else 0) + (c if head_trains else 0))
