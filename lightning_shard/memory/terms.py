"""The terms, by name. To add one: write a function (situation, moment) -> bytes and name it here."""

from collections.abc import Callable

from lightning_shard.memory import overheads, states, transit
from lightning_shard.memory.moments import Moment
from lightning_shard.memory.situation import Situation

Term = Callable[[Situation, Moment], int]

TERMS: dict[str, Term] = {
    "frozen_weights": states.frozen_weights,
    "trained_weights": states.trained_weights,
    "optimizer_state": states.optimizer_state,
    "gradients": states.gradients,
    "deferred_gradients": states.deferred_gradients,
    "ddp_buckets": states.ddp_buckets,
    "flat_gradients": states.flat_gradients,
    "buffers": states.buffers,
    "compute_copies": transit.compute_copies,
    "gathered_weights": transit.gathered_weights,
    "activations": transit.activations,
    "logits_and_loss": transit.logits_and_loss,
    "activation_gradients": transit.activation_gradients,
    "weight_gradients": transit.weight_gradients,
    "reduce_buffers": transit.reduce_buffers,
    "optimizer_step": states.optimizer_step,
}
"""Live tensors; their sum at the peak moment is ``allocated_bytes``."""

OVERHEADS: dict[str, Term] = {
    "allocator_slack": overheads.allocator_slack,
    "device_context": overheads.device_context,
    "collective_buffers": overheads.collective_buffers,
}
"""What comes on top of live tensors: slack makes ``reserved_bytes``, the rest ``device_bytes``."""
