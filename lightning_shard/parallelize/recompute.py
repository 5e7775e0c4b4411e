"""Activation checkpointing: keep a block's inputs, compute the rest again in backward.

Applied to a block's ``forward``, so module and parameter names stay as they are, FSDP's hooks stay outside
(backward gathers a block before it recomputes), and one graph can be compiled over it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lightning_shard.parallelize.cast import ComputeCast
from lightning_shard.parallelize.units import Units
from lightning_shard.plans import Plan

CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Key-value caches a block would append to twice; training does not read them."""

EXPENSIVE = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
"""What the selective policy weighs: attention is always kept, every second matrix product is."""

MATRIX_PRODUCTS = EXPENSIVE[:3]


def checkpoint_activations(units: Units, plan: Plan, casts: dict[nn.Module, ComputeCast]) -> None:
    """Make the first ``activation_checkpoint_blocks`` blocks of ``units`` recompute, as the plan says.

    Args:
        units: the blocks.
        plan: ``activation_checkpoint`` ("full" keeps inputs only, "selective" also attention and every second
            matrix product) and how many blocks.
        casts: a block's cast of its FP32 masters; it must be in force again while recomputing.
    """
    context_fn = _selective_contexts if plan.activation_checkpoint == "selective" else None
    for block in recomputing_blocks(units, plan):
        units.remember_forward(block)
        block.forward = _recomputing(block.forward, casts.get(block), context_fn)


def recomputing_blocks(units: Units, plan: Plan) -> list[nn.Module]:
    """The blocks that the plan makes recompute: the first ones, whose activations wait longest."""
    if plan.activation_checkpoint == "none":
        return []
    return [block for _, block in units.blocks[: plan.activation_checkpoint_blocks]]


def _recomputing(
    forward: Callable[..., Any], cast: ComputeCast | None, context_fn: Callable[[], Any] | None
) -> Callable[..., Any]:
    extra: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}

    def run(*args: Any, **kwargs: Any) -> Any:
        if cast is None:
            return forward(*args, **kwargs)
        with cast():
            return forward(*args, **kwargs)

    @functools.wraps(forward)
    def recomputing(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        for name in CACHES:
            if name in kwargs:
                kwargs[name] = None
        return checkpoint(run, *args, use_reentrant=False, **extra, **kwargs)

    return recomputing


def _selective_contexts() -> Any:
    counts = {False: 0, True: 0}

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation not in EXPENSIVE:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if operation in MATRIX_PRODUCTS:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
