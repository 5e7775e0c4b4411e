"""``torch.compile`` block by block, in place: one graph for N equal blocks, and names that stay as they are."""

import torch

from lightning_shard._compat import compile_whole_blocks
from lightning_shard.parallelize.units import Units


def compile_blocks(units: Units) -> None:
    """Compile every block's forward. Outside checkpointing (the compiler sees it), inside FSDP's hooks."""
    compile_whole_blocks()
    for _, block in units.blocks:
        units.remember_forward(block)
        block.forward = torch.compile(block.forward)
