"""Instruction data: rows in, batches out, the same for any number of ranks."""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_shard.finetune.batches import Item, Split, Truncation, collate, make_split
from lightning_shard.finetune.dealt import DealtData
from lightning_shard.finetune.encode import IGNORED, Example, encode
from lightning_shard.finetune.hub import pretrained
from lightning_shard.finetune.limits import require_at_least, require_choices, require_share
from lightning_shard.finetune.order import Deal
from lightning_shard.finetune.rows import Message, Row, read_rows, stream_rows
from lightning_shard.finetune.sources import Source
from lightning_shard.finetune.stream import Stream
from lightning_shard.parallelize.together import on_all_ranks

SAMPLES = 8
"""Validation rows of which the text is kept, for sample answers."""

log = logging.getLogger(__name__)


class InstructionData(DealtData):
    """Conversations, prompts with completions, or plain text, from files, folders or the hub, tokenised once.

    Rows hold ``prompt``/``completion``, ``messages``, ShareGPT's ``conversations``, Alpaca's ``instruction``/``output``
    or ``text``. Only completions and assistant's turns are learned, with the model's chat template. Batches hold
    ``input_ids`` and ``labels``, both (rows, tokens), padded on the right to the longest row, and ``position_ids``
    where rows are packed.

    Which rows make an optimizer step follows from the data, ``seed`` and the global batch size alone, not from the
    number of ranks; each row counts once. A resumed run goes on with the very next row.

    Args:
        tokenizer: folder or hub id to take the tokenizer from; the model's own by default in recipes.
        train: JSONL, Parquet or CSV file, folder or hub id to learn from.
        validation: the same to validate on; null for none, or for a part of ``train``.
        train_split: split of a data set that has several.
        validation_split: the same; without ``validation`` it is a split of ``train``.
        validation_share: share of the training rows to validate on instead, chosen by ``seed``.
        subset: configuration of a data set on the hub that has several.
        columns: where the data's names differ, ours to theirs: ``{prompt: question, completion: answer}``.
        max_seq_len: longest row in tokens.
        truncation: of a longer row: cut its ``end`` or its ``start``, ``drop`` it, or ``split`` it into several.
        packing: fill rows of ``max_seq_len`` with several examples that do not see one another.
        group_by_length: make batches of examples of like length, which saves padding.
        streaming: read rows while training runs instead of holding them; needs ``max_steps``.
        shuffle: a new order of the training rows in every epoch.
        shuffle_buffer: rows that are shuffled among themselves in streaming.
        micro_batch_size: rows per rank and forward pass; null takes what is predicted to run fastest and fits.
        global_batch_size: rows per optimizer step over all ranks; sets the Trainer's ``accumulate_grad_batches``.
        global_batch_tokens: the same in tokens: of packed rows their capacity counts, of others their mean length.
        validation_batch_size: rows per rank in validation; by default the same.
        pad_to_multiple: batches' lengths are multiples of this.
        max_train_rows: use only the first rows.
        max_validation_rows: use only the first rows.
        num_workers: processes that collate batches; rows lie in memory, so 0 is usually best.
        seed: of the order and of the validation rows.

    Raises:
        ValueError: for a value out of range, or values that exclude one another.
    """

    def __init__(
        self,
        tokenizer: str,
        train: str,
        validation: str | None = None,
        train_split: str = "train",
        validation_split: str | None = None,
        validation_share: float | None = None,
        subset: str | None = None,
        columns: dict[str, str] | None = None,
        max_seq_len: int = 1024,
        truncation: Truncation = "end",
        packing: bool = False,
        group_by_length: bool = False,
        streaming: bool = False,
        shuffle: bool = True,
        shuffle_buffer: int = 1000,
        micro_batch_size: int | None = 1,
        global_batch_size: int | None = None,
        global_batch_tokens: int | None = None,
        validation_batch_size: int | None = None,
        pad_to_multiple: int = 8,
        max_train_rows: int | None = None,
        max_validation_rows: int | None = None,
        num_workers: int = 0,
        seed: int = 42,
    ) -> None:
        super().__init__(
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            validation_batch_size=validation_batch_size,
            shuffle=shuffle,
            num_workers=num_workers,
            seed=seed,
        )
        self.tokenizer_path = tokenizer
        self.sources = _sources(train, train_split, validation, validation_split, subset, kept=not streaming)
        self.validation_share = validation_share
        self.columns = columns
        self.limits = {"train": max_train_rows, "validation": max_validation_rows}
        self.max_seq_len = max_seq_len
        self.truncation = truncation
        self.packing = packing
        self.group_by_length = group_by_length
        self.streaming = streaming
        self.shuffle_buffer = shuffle_buffer if shuffle else 1
        self.global_batch_tokens = global_batch_tokens
        self.pad_to_multiple = pad_to_multiple
        self.tokenizer: Any = None
        self.splits: dict[str, Split] = {}
        """What was read, by ``train`` and ``validation``; a stream is not in it."""
        self.sample_conversations: list[list[Message]] = []
        """Of the first validation rows, each up to and with an assistant's last turn."""
        _require_sound(self)

    @property
    def has_validation(self) -> bool:
        """Whether there is anything to validate on."""
        return "validation" in self.sources or self.validation_share is not None

    @property
    def processor(self) -> Any:
        """What turns the data into the model's inputs, written beside a whole model: the tokenizer."""
        return self.tokenizer

    def require_rows(self, number: int) -> None:
        """Raise ValueError where one of the first rows of a source breaks the rule."""
        for source in self.sources.values():
            read_rows(source, number, self.columns)

    @override
    def setup(self, stage: str) -> None:
        """Read and tokenise, once; on a bad row every rank stops with the same error."""
        if self.tokenizer is None:
            self.splits = on_all_ranks(self._load)
            for name, split in self.splits.items():
                log.info("%s: %s", name, split)

    @override
    def train_dataloader(self) -> DataLoader[Item]:
        if self.streaming:
            deal = self.settled_deal()
            return self.loader(self._stream(deal), deal.micro_batch_size, self._collate)
        split = self.splits["train"]
        group = self.group_by_length
        return self.training_loader(split.items, split.lengths, self._nothing, self._collate, group_by_length=group)

    @override
    def val_dataloader(self) -> Any:
        if not self.has_validation:
            return []
        return self.validation_loader(self.splits["validation"].items, self._nothing, self._collate)

    @override
    def rows_per_step(self) -> int | None:
        """The global batch in rows; None where micro-batch, ranks and accumulation make it."""
        if self.global_batch_tokens is None:
            return self.global_batch_size
        each = float(self.max_seq_len)
        if not self.packing and not self.streaming:
            split = self.splits["train"]
            each = split.num_tokens / len(split.examples)
        return max(1, round(self.global_batch_tokens / each))

    # --- reading --------------------------------------------------------------------------------------------

    def _load(self) -> dict[str, Split]:
        from transformers import AutoTokenizer

        rows = self._read()
        tokenizer = pretrained(AutoTokenizer, self.tokenizer_path)
        self.sample_conversations = _conversations(rows.get("validation", [])[:SAMPLES])
        splits = {name: self._split(name, some, tokenizer) for name, some in rows.items()}
        self.tokenizer = tokenizer
        return splits

    def _read(self) -> dict[str, list[Row]]:
        eager = [name for name in self.sources if not (self.streaming and name == "train")]
        rows = {name: read_rows(self.sources[name], self.limits[name], self.columns) for name in eager}
        if self.validation_share is not None:
            rows["train"], rows["validation"] = self._divided(rows["train"], self.validation_share)
        return rows

    def _divided(self, rows: list[Row], share: float) -> tuple[list[Row], list[Row]]:
        number = max(1, round(share * len(rows)))
        if number >= len(rows):
            raise ValueError(
                f"validation_share={share} of the {len(rows)} rows of {self.sources['train'].path} leaves none to learn "
                "from. Give more rows, or a file for validation."
            )
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.seed)).tolist()
        chosen = set(order[:number])
        kept = [row for i, row in enumerate(rows) if i not in chosen]
        return kept, [row for i, row in enumerate(rows) if i in chosen][: self.limits["validation"]]

    def _split(self, name: str, rows: list[Row], tokenizer: Any) -> Split:
        place = self.sources.get(name, self.sources["train"]).path
        empty = tuple(row.place for row in rows if row.answers_nothing)
        if len(empty) == len(rows):
            raise ValueError(f"{place}: every answer in it is empty, so there is nothing to learn but to say nothing.")
        examples = [encode(row, tokenizer) for row in rows]
        split = make_split(examples, self.max_seq_len, place, truncation=self.truncation, packing=self.packing)
        return dataclasses.replace(split, empty=empty)

    # --- loaders --------------------------------------------------------------------------------------------

    def _stream(self, deal: Deal) -> Stream:
        rows: Callable[[int], Iterator[Row]] = partial(stream_rows, self.sources["train"], columns=self.columns)
        return Stream(
            rows=rows,
            encode=partial(encode, tokenizer=self.tokenizer),
            deal=deal,
            empty=self._nothing[0],
            longest=self.max_seq_len,
            truncation=self.truncation,
            packing=self.packing,
            shuffle_buffer=self.shuffle_buffer,
            limit=self.limits["train"],
            seed=self.seed,
            progress=self.progress,
        )

    @property
    def _collate(self) -> Any:
        return partial(
            collate, pad_id=self._pad_id, multiple=self.pad_to_multiple, longest=self.max_seq_len, packed=self.packing
        )

    @property
    def _nothing(self) -> Item:
        return (Example([self._pad_id], [IGNORED]),)

    @property
    def _pad_id(self) -> int:
        """Any token will do: padding is never learned, and nothing looks back at it."""
        pad = self.tokenizer.pad_token_id
        return int(self.tokenizer.eos_token_id or 0) if pad is None else int(pad)


def _sources(
    train: str,
    train_split: str,
    validation: str | None,
    validation_split: str | None,
    subset: str | None,
    *,
    kept: bool,
) -> dict[str, Source]:
    sources = {"train": Source(path=train, split=train_split, subset=subset, kept=kept)}
    if validation is not None or validation_split is not None:
        path = train if validation is None else validation
        sources["validation"] = Source(path=path, split=validation_split or "train", subset=subset, kept=kept)
    return sources


def _require_sound(data: InstructionData) -> None:
    """Raise ValueError for a value out of range, or values that exclude one another."""
    sizes = {
        "data.max_seq_len": data.max_seq_len,
        "data.shuffle_buffer": data.shuffle_buffer,
        "data.global_batch_tokens": data.global_batch_tokens,
        "data.pad_to_multiple": data.pad_to_multiple,
        **{f"data.max_{name}_rows": limit for name, limit in data.limits.items()},
    }
    require_at_least(1, **sizes)
    require_choices("data.truncation", data.truncation, ("end", "start", "drop", "split"))
    require_share("data.validation_share", data.validation_share)
    exclusive = [
        (
            "global_batch_size",
            data.global_batch_size is not None,
            "global_batch_tokens",
            data.global_batch_tokens is not None,
        ),
        ("validation", "validation" in data.sources, "validation_share", data.validation_share is not None),
        ("packing", data.packing, "group_by_length", data.group_by_length),
        ("streaming", data.streaming, "group_by_length", data.group_by_length),
        ("streaming", data.streaming, "validation_share", data.validation_share is not None),
        ("streaming", data.streaming, "num_workers above 1", data.num_workers > 1),
        (
            "streaming without packing",
            data.streaming and not data.packing,
            "truncation: split",
            data.truncation == "split",
        ),
    ]
    for one, has_one, other, has_other in exclusive:
        if has_one and has_other:
            raise ValueError(f"data: {one} and {other} exclude one another. Leave one of them out.")


def _conversations(rows: list[Row]) -> list[list[Message]]:
    found = []
    for row in rows:
        turns = list(row.messages or [])
        while turns and turns[-1]["role"] != "assistant":
            turns.pop()
        if len(turns) > 1:
            found.append(turns)
    return found
