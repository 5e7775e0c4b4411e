"""Examples become a split and padded batches."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from lightning_shard.finetune.encode import IGNORED, Example

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The examples of one file, and what became of its rows."""

    examples: list[Example]
    num_rows: int
    num_truncated: int
    """Rows longer than ``max_seq_len``, cut at their end."""
    num_left_out: int
    """Rows without a token to learn, as after a cut within the prompt."""

    @override
    def __str__(self) -> str:
        tokens = sum(len(example.input_ids) for example in self.examples)
        labels = sum(example.num_label_tokens for example in self.examples)
        return (
            f"{len(self.examples):,} of {self.num_rows:,} rows, {tokens:,} tokens, {labels:,} of them learned; "
            f"{self.num_truncated:,} rows truncated, {self.num_left_out:,} left out with nothing to learn"
        )


def make_split(examples: list[Example], longest: int, path: Path) -> Split:
    """The examples cut to ``longest`` tokens, without those that have nothing left to learn.

    Raises:
        ValueError: when none has.
    """
    cut = [example.cut(longest) for example in examples]
    kept = [example for example in cut if example.num_label_tokens]
    if not kept:
        raise ValueError(
            f"{path}: none of its {len(examples)} rows has a token to learn within max_seq_len={longest}. "
            "Raise max_seq_len, or shorten the prompts."
        )
    return Split(
        examples=kept,
        num_rows=len(examples),
        num_truncated=sum(len(example.input_ids) > longest for example in examples),
        num_left_out=len(cut) - len(kept),
    )


def filled_up(examples: Sequence[Example], ranks: int, pad_id: int) -> list[Example]:
    """The examples and as many empty ones as make their number a multiple of the ranks."""
    empty = Example([pad_id], [IGNORED])
    return [*examples, *[empty] * (-len(examples) % ranks)]


def collate(examples: Sequence[Example], *, pad_id: int, multiple: int, longest: int) -> Batch:
    """A batch padded on the right to its longest row, rounded up to ``multiple`` but not beyond ``longest``.

    There is no attention mask: under causal attention no token looks at the padding to its right.
    """
    length = max(len(example.input_ids) for example in examples)
    length = max(length, min(-(-length // multiple) * multiple, longest))
    return {
        "input_ids": _padded([example.input_ids for example in examples], length, pad_id),
        "labels": _padded([example.labels for example in examples], length, IGNORED),
    }


def _padded(rows: list[list[int]], length: int, value: int) -> Tensor:
    return torch.tensor([row + [value] * (length - len(row)) for row in rows], dtype=torch.long)
