"""What autograd really keeps of a block, counted on CPU: unique storages, parameters excluded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn


def saved_storages(model: nn.Module, block: nn.Module, **inputs: Any) -> list[int]:
    """Bytes of each storage that the block's forward saves for backward, shared tables not counted.

    Dropout runs as on accelerators, where its mask is one byte per element; rotary tables and masks, which
    all blocks share, are told by not requiring a gradient and being made outside the block.
    """
    outside = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    alive: WeakSet[_Kept] = WeakSet()  # a part of the graph that leads nowhere goes at once

    def pack(tensor: torch.Tensor) -> _Kept:
        kept = _Kept(tensor)
        if tensor.untyped_storage().data_ptr() not in outside:
            alive.add(kept)
        return kept

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor)
    handles = [
        block.register_forward_pre_hook(lambda *args: _enter(hooks, outside, args[1:]), with_kwargs=True),
        block.register_forward_hook(lambda *_: hooks.__exit__(None, None, None)),
    ]
    with _as_on_accelerators():
        output = model(**inputs)
    for handle in handles:
        handle.remove()
    storages = {kept.tensor.untyped_storage().data_ptr(): kept.tensor.untyped_storage().nbytes() for kept in alive}
    del output
    return list(storages.values())


class _Kept:
    """A tensor as autograd holds it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def _enter(hooks: Any, outside: set[int], arguments: Any) -> None:
    for tensor in _tensors(arguments):
        if not tensor.requires_grad:
            outside.add(tensor.untyped_storage().data_ptr())
    hooks.__enter__()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)


@contextmanager
def _as_on_accelerators() -> Iterator[None]:
    """Dropout with a one-byte mask, and fused attention even where it drops out."""
    dropout, attention = nn.functional.dropout, nn.functional.scaled_dot_product_attention

    def fused_dropout(
        input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> torch.Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p else input

    def fused_attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        return attention(*args, **{**kwargs, "dropout_p": 0.0})

    nn.functional.dropout, nn.functional.scaled_dot_product_attention = fused_dropout, fused_attention
    try:
        yield
    finally:
        nn.functional.dropout, nn.functional.scaled_dot_product_attention = dropout, attention
