"""``torch.compile`` block by block, in place: one graph for N equal blocks, and names that stay as they are."""

import logging

import torch
import torch.distributed as dist

from lightning_shard._compat import compile_whole_blocks
from lightning_shard.parallelize.units import Units
from lightning_shard.plans import Plan

log = logging.getLogger(__name__)


def compile_blocks(units: Units, plan: Plan) -> None:
    """Compile every block's forward. Outside checkpointing (the compiler sees it), inside FSDP's hooks."""
    compile_whole_blocks()
    if plan.tp > 1 and plan.activation_checkpoint != "none" and (not dist.is_initialized() or dist.get_rank() == 0):
        log.warning(
            "compile=True with tp=%d: blocks that recompute run uncompiled, since torch's compiler leaves a checkpoint whose "
            "layers sum over ranks to Python. The numbers are the same; activation_checkpoint='none' compiles.",
            plan.tp,
        )
    for _, block in units.blocks:
        units.remember_forward(block)
        block.forward = torch.compile(block.forward)
