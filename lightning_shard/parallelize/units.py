"""Which parts of a module are gathered together: blocks, big leaves outside them, and the rest."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_shard._compat import is_peft_wrapper
from lightning_shard.blocks import find_blocks

log = logging.getLogger(__name__)

BIG_LEAF_SHARE = 0.25
"""A layer outside every block gets a group of its own above this share of the largest block."""


@dataclass
class Units:
    """The wrap units of one root module, in the order of their registration."""

    root: nn.Module
    blocks: list[tuple[str, nn.Module]] = field(default_factory=list)
    """Repeated blocks: gathered one at a time."""
    embeddings: list[tuple[str, nn.Module]] = field(default_factory=list)
    """Large look-up tables outside the blocks: their gradient does not need their weight."""
    heads: list[tuple[str, nn.Module]] = field(default_factory=list)
    """Large layers after the blocks: used at once in backward, so kept between the two passes."""
    _forwards: dict[nn.Module, Any] = field(default_factory=dict)

    def remember_forward(self, block: nn.Module) -> None:
        """Before a block's forward is replaced: note what stood there, the user's own or nothing."""
        self._forwards.setdefault(block, block.__dict__.get("forward"))

    def restore_forwards(self) -> None:
        """Give every block back the forward it had."""
        for block, forward in self._forwards.items():
            block.__dict__.pop("forward", None)
            if forward is not None:
                block.__dict__["forward"] = forward
        self._forwards.clear()

    def all(self) -> Iterator[tuple[str, nn.Module]]:
        """Every unit below the root, inner ones before the root."""
        yield from self.blocks
        yield from self.embeddings
        yield from self.heads


def find_units(root: nn.Module) -> Units:
    """Find the wrap units of ``root``; what no unit holds belongs to the root itself.

    A weight that two places share (a tied head) stays with the root, which is gathered for the whole
    forward: in a group of its own it would be freed while its twin still needs it.
    """
    units = Units(root, blocks=find_blocks(root))
    inside = {id(module) for _, block in units.blocks for module in block.modules()}
    threshold = BIG_LEAF_SHARE * max((_num_elements(block) for _, block in units.blocks), default=float("inf"))
    shared = _shared_parameters(root)
    after_blocks = False
    for name, module in root.named_modules():
        if id(module) in inside:
            after_blocks = True
            continue
        kind = _big_leaf_kind(module, threshold, shared)
        if kind is None:
            continue
        inside.update(id(child) for child in module.modules())
        (units.heads if kind == "linear" and after_blocks else units.embeddings).append((name, module))
    return units


def _big_leaf_kind(module: nn.Module, threshold: float, shared: set[int]) -> str | None:
    core = _unwrapped(module)
    # Linear to the letter: a subclass may be used without its own forward being called (the output
    # projection of nn.MultiheadAttention is).
    kind = "embedding" if isinstance(core, nn.Embedding) else "linear" if type(core) is nn.Linear else None
    if kind is None or _num_elements(module) < threshold:
        return None
    return None if any(id(p) in shared for p in module.parameters()) else kind


def _unwrapped(module: nn.Module) -> nn.Module:
    """The user's layer below a peft wrapper, so that layer and adapter share a group."""
    while is_peft_wrapper(module):
        inner = getattr(module, "base_layer", None) or getattr(module, "original_module", None)
        if not isinstance(inner, nn.Module):
            break
        module = inner
    return module


def _shared_parameters(root: nn.Module) -> set[int]:
    owners: dict[int, int] = {}
    for _, parameter in root.named_parameters(remove_duplicate=False):
        owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    return {key for key, count in owners.items() if count > 1}


def _num_elements(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def class_name(module: nn.Module) -> str:
    """The user's name for ``module``'s class; sharding puts a class of its own before it."""
    cls = type(module)
    if isinstance(module, FSDPModule) and cls.__name__.startswith("FSDP"):
        cls = cls.__mro__[2]
    return cls.__name__


def warn_no_blocks(root: nn.Module) -> None:
    """Say that the whole module is one group, and how large that is."""
    total = sum(p.numel() * p.element_size() for p in root.parameters())
    log.warning(
        "No repeated blocks were found in %s: all %.1f MiB of parameters form one group, gathered whole in every step, "
        "so sharding saves little. Put the repeated layers in an nn.ModuleList, or set `_no_split_modules` to the "
        "class names of the blocks.",
        class_name(root),
        total / 2**20,
    )
