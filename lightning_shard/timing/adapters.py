"""Time of adapters beside their layers: products of a small rank are as fast as memory, not as arithmetic."""

from lightning_shard.activations.block import num_tokens
from lightning_shard.activations.linears import LinearUse, find_linears
from lightning_shard.memory import Situation
from lightning_shard.specs import dtype_bytes

BACKWARD = 2
"""Bytes the backward of an elementwise operation or a product moves against its forward: both operands again."""


def adapter_s(s: Situation) -> float:
    """Seconds of one forward through all adapters: what they read and write over the device's memory bandwidth."""
    tokens = num_tokens(s.model, s.train)
    moved = sum(
        block.group.count * tokens * _bytes_per_token(s, use)
        for block in s.blocks
        for use in find_linears(block.group.unit).uses
        if use.rank
    )
    moved += sum(
        block.group.count * _bytes_of_norms(s, use)
        for block in s.blocks
        for use in find_linears(block.group.unit).uses
        if use.magnitude
    )
    return moved / s.cluster.device.memory_bytes_per_s


def _bytes_per_token(s: Situation, use: LinearUse) -> int:
    """Of the input: its cast to the adapter's own type (read, written), dropout (read, written with a one-byte mask),
    the first product (read). Of the output: the second product (written), its scale (read, written), the sum with the
    layer's own (two read, one written), and its cast back.
    """
    adapter, c = s.model.adapter, s.compute_bytes
    wide = adapter is not None and adapter.compute_dtype is not None
    own = dtype_bytes(adapter.compute_dtype) if adapter is not None and adapter.compute_dtype is not None else c
    cast = (c + own) if wide and own != c else 0
    dropout = 2 * own + 1 if adapter is not None and adapter.dropout else 0
    scaled = (
        (3 * own + 2 * c + 3 * own) if use.magnitude else 0
    )  # both results times their magnitude, and the sum of them
    return use.num_in * (cast + dropout + own) + use.num_out * (own + 2 * own + c + 2 * own + cast + scaled)


def _bytes_of_norms(s: Situation, use: LinearUse) -> int:
    """Of DoRA's norms, however many tokens: peft pushes an identity (in, in) through the adapter (written, read), scales the
    product, adds the weight and takes the norm (the product written, twice read; its scaled copy and the sum written and
    read; the weight read). Split layers add the product onto the weight in one pass (read, written, read).
    """
    entries = use.num_in * use.num_out
    return s.compute_bytes * (3 * entries if s.plan.tp > 1 else 2 * use.num_in**2 + 7 * entries)
