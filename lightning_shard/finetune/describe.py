"""The data before training: counts, lengths, what is cut and learned, and one example with what is learned in colour."""

import statistics
from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_shard.finetune.batches import Split
from lightning_shard.finetune.data import InstructionData
from lightning_shard.finetune.dealt import DealtData
from lightning_shard.finetune.encode import IGNORED, Example

LEARNED, CONTEXT, ODD = "green", "dim", "yellow"
SHOWN_TOKENS = 256


def describe_data(data: DealtData) -> RenderableType:
    """Everything a user wants to have seen before paying for a run."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    if isinstance(data, InstructionData):
        return _describe_instructions(data, table)
    table.add_row("Labels", ", ".join(getattr(data, "label_names", ())))
    table.add_row("Batch", _batch(data))
    return table


def _describe_instructions(data: InstructionData, table: Table) -> RenderableType:
    for name, split in data.splits.items():
        table.add_row(name.capitalize(), f"{split}.")
        table.add_row("", _lengths(split))
        if split.num_truncated:
            said = f"the longest row has {split.longest_row:,} tokens: with data.max_seq_len={split.longest_row} none is cut"
            table.add_row("", Text(said, ODD))
        if split.empty:
            said = f"rows with an empty answer: {len(split.empty):,}, the first is {split.empty[0]}; they teach to say nothing"
            table.add_row("", Text(said, ODD))
    if data.streaming:
        table.add_row("Train", f"rows of {data.sources['train'].path}, read and counted while training runs.")
    table.add_row("Batch", _batch(data))
    parts: list[RenderableType] = [table]
    if data.splits:
        parts.append(Text.assemble("First example, ", ("what is learned", LEARNED), " in colour:"))
        parts.append(render_mask(next(iter(data.splits.values())).examples[0], data.tokenizer))
    return Group(*parts)


def data_facts(data: InstructionData) -> dict[str, dict[str, int]]:
    """The same as plain JSON values, by split."""
    return {
        name: {
            "rows": split.num_rows,
            "examples": len(split.examples),
            "batch_rows": len(split.items),
            "truncated": split.num_truncated,
            "left_out": split.num_left_out,
            "empty": len(split.empty),
            "tokens": split.num_tokens,
            "label_tokens": split.num_label_tokens,
            "longest": max(len(example.input_ids) for example in split.examples),
        }
        for name, split in data.splits.items()
    }


def render_mask(example: Example, tokenizer: Any) -> Text:
    """An example's text; what is learned is coloured, the rest is dim."""
    text = Text()
    for learned, ids in _stretches(example.input_ids[:SHOWN_TOKENS], example.labels):
        text.append(tokenizer.decode(ids), style=LEARNED if learned else CONTEXT)
    left = len(example.input_ids) - SHOWN_TOKENS
    return text.append(f" ... {left:,} more tokens" if left > 0 else "")


def _stretches(ids: list[int], labels: list[int]) -> Iterable[tuple[bool, list[int]]]:
    stretches: list[tuple[bool, list[int]]] = []
    for token, label in zip(ids, labels, strict=False):
        if not stretches or stretches[-1][0] != (label != IGNORED):
            stretches.append((label != IGNORED, []))
        stretches[-1][1].append(token)
    return stretches


def _lengths(split: Split) -> str:
    lengths = sorted(len(example.input_ids) for example in split.examples)
    high = lengths[int(0.95 * (len(lengths) - 1))]
    return (
        f"lengths in tokens: {lengths[0]:,} to {lengths[-1]:,}, median {statistics.median(lengths):,.0f}, 95 % within "
        f"{high:,}; {split.num_label_tokens / split.num_tokens:.0%} learned"
    )


def _batch(data: DealtData) -> str:
    deal = data.deal()
    form = ""
    if isinstance(data, InstructionData):
        form = f" {'packed to' if data.packing else 'of up to'} {data.max_seq_len:,} tokens"
    return (
        f"{deal.global_batch_size} rows{form} per optimizer step: {deal.accumulate} micro-batches of "
        f"{deal.micro_batch_size} on each of {deal.ranks} ranks"
    )
