"""Examples become a split and padded batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor
from typing_extensions import override

from lightning_shard.finetune.encode import IGNORED, Example
from lightning_shard.finetune.packing import pack

Batch = dict[str, Tensor]
Item = tuple[Example, ...]
"""What fills one row of a batch: one example, or several that are packed."""

Truncation = Literal["end", "start", "drop", "split"]
TRUNCATIONS: tuple[str, ...] = get_args(Truncation)


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The examples of one source, and what became of its rows."""

    examples: list[Example]
    num_rows: int
    num_truncated: int
    """Rows longer than ``max_seq_len``, dealt with as the policy says."""
    num_left_out: int
    """Rows without a token to learn, as after a cut within the prompt, or dropped for their length."""
    longest_row: int = 0
    """Tokens of the longest row, before it was cut."""
    empty: tuple[str, ...] = ()
    """Where rows stand whose answers are empty: they teach the model to say nothing."""
    items: list[Item] = field(default_factory=list)
    """The rows of batches: each an example, or several that are packed."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all examples."""
        return sum(len(example.input_ids) for example in self.examples)

    @property
    def num_label_tokens(self) -> int:
        """Tokens that are learned."""
        return sum(example.num_label_tokens for example in self.examples)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each item."""
        return [sum(len(example.input_ids) for example in item) for item in self.items]

    @override
    def __str__(self) -> str:
        packed = f" in {len(self.items):,} packed rows" if len(self.items) < len(self.examples) else ""
        return (
            f"{len(self.examples):,} of {self.num_rows:,} rows, {self.num_tokens:,} tokens, {self.num_label_tokens:,} of "
            f"them learned{packed}; {self.num_truncated:,} rows truncated, {self.num_left_out:,} left out with nothing to "
            "learn"
        )


def make_split(
    examples: Sequence[Example], longest: int, place: object, *, truncation: Truncation = "end", packing: bool = False
) -> Split:
    """The examples within ``longest`` tokens, without those that have nothing left to learn.

    Raises:
        ValueError: when none has; it names ``place``.
    """
    kept: list[Example] = []
    left_out = 0
    for example in examples:
        parts = list(within(example, longest, truncation))
        kept += parts
        left_out += not parts
    if not kept:
        raise ValueError(
            f"{place}: none of its {len(examples)} rows has a token to learn within max_seq_len={longest}. "
            "Raise max_seq_len, or shorten the prompts."
        )
    rows = pack([len(example.input_ids) for example in kept], longest) if packing else [[i] for i in range(len(kept))]
    return Split(
        examples=kept,
        num_rows=len(examples),
        num_truncated=sum(len(example.input_ids) > longest for example in examples),
        num_left_out=left_out,
        longest_row=max(len(example.input_ids) for example in examples),
        items=[tuple(kept[i] for i in row) for row in rows],
    )


def within(example: Example, longest: int, truncation: Truncation) -> Iterator[Example]:
    """What becomes of an example under a truncation policy: parts of at most ``longest`` tokens with some to learn."""
    length = len(example.input_ids)
    if length <= longest:
        parts = [example]
    elif truncation == "drop":
        parts = []
    elif truncation == "split":
        parts = [example.part(start, start + longest) for start in range(0, length, longest)]
    else:
        parts = [example.part(0, longest) if truncation == "end" else example.part(length - longest, length)]
    return (part for part in parts if part.num_label_tokens)


def collate(items: Sequence[Item], *, pad_id: int, multiple: int, longest: int, packed: bool = False) -> Batch:
    """A batch padded on the right to its longest row, rounded up to ``multiple`` but not beyond ``longest``.

    There is no attention mask: under causal attention no token looks at the padding to its right. A packed batch has
    ``position_ids`` that start anew with each example and with the padding, from which transformers' masks and
    kernels keep them apart; the first token of each example is not learned, since what stands before it is another's.
    """
    rows = [_joined(item) for item in items]
    length = max(len(row.input_ids) for row in rows)
    length = max(length, min(-(-length // multiple) * multiple, longest))
    batch = {
        "input_ids": _padded([row.input_ids for row in rows], length, pad_id),
        "labels": _padded([row.labels for row in rows], length, IGNORED),
    }
    if packed:
        batch["position_ids"] = torch.tensor([_positions(item, length) for item in items])
    return batch


def _joined(item: Item) -> Example:
    if len(item) == 1:
        return item[0]
    ids = [token for example in item for token in example.input_ids]
    labels = [label for example in item for label in (IGNORED, *example.labels[1:])]
    return Example(ids, labels)


def _positions(item: Item, length: int) -> list[int]:
    used = [position for example in item for position in range(len(example.input_ids))]
    return used + list(range(length - len(used)))


def _padded(rows: list[list[int]], length: int, value: int) -> Tensor:
    return torch.tensor([row + [value] * (length - len(row)) for row in rows], dtype=torch.long)
