"""How much a batch holds, read from shapes and masks without waiting for the device."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(slots=True)
class Work:
    """Samples, positions and tokens of some batches of one rank."""

    samples: int = 0
    positions: int = 0
    """Of token ids, padding included: what is computed."""
    tokens: int = 0
    """Of batches without a mask."""
    masked_tokens: Tensor | None = None
    """Of batches with one: a number that stays on the device."""

    def add(self, batch: Any) -> None:
        """Count a batch in. Tokens are those the attention mask leaves, or all positions where there is no mask."""
        rows, tokens, mask = measure(batch)
        self.samples += rows
        self.positions += tokens
        if mask is None:
            self.tokens += tokens
        else:
            self.merge(Work(masked_tokens=(mask != 0).sum()))

    def merge(self, other: "Work") -> None:
        """Count in what another has counted."""
        self.samples += other.samples
        self.positions += other.positions
        self.tokens += other.tokens
        if other.masked_tokens is not None:
            mine = self.masked_tokens
            self.masked_tokens = other.masked_tokens if mine is None else mine + other.masked_tokens

    def take(self) -> tuple[int, int]:
        """(samples, tokens), and start again. Waits for the device where batches had masks."""
        masked = 0 if self.masked_tokens is None else int(self.masked_tokens.item())
        taken = self.samples, self.tokens + masked
        self.samples, self.positions, self.tokens, self.masked_tokens = 0, 0, 0, None
        return taken


def measure(batch: Any) -> tuple[int, int, Tensor | None]:
    """(rows, positions, mask) of a batch: 0 positions for a batch without a matrix of token ids, no mask where none is given."""
    tensors = list(_tensors(batch))
    ids = _entry(batch, "input_ids")
    if ids is None:
        ids = next((t for t in tensors if t.dim() == 2 and not t.is_floating_point() and t.dtype != torch.bool), None)
    if ids is None:
        return next((t.shape[0] for t in tensors if t.dim()), 0), 0, None
    mask = _entry(batch, "attention_mask")
    if mask is not None and mask.shape == ids.shape:
        return ids.shape[0], ids.numel(), mask
    return ids.shape[0], ids.numel(), None


def _entry(batch: Any, name: str) -> Tensor | None:
    value = batch.get(name) if isinstance(batch, Mapping) else None
    return value if isinstance(value, Tensor) and value.dim() == 2 else None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
