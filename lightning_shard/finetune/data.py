"""Instruction data: JSONL in, padded batches out, exact under any number of ranks."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_shard.finetune.agree import on_all_ranks
from lightning_shard.finetune.batches import Split, collate, filled_up, make_split
from lightning_shard.finetune.encode import Example, encode
from lightning_shard.finetune.hub import pretrained
from lightning_shard.finetune.rows import Message, Row, read_rows

SAMPLES = 8
"""Validation rows of which the text is kept, for sample answers."""

log = logging.getLogger(__name__)


class InstructionData(LightningDataModule):
    """Rows of ``prompt``/``completion``, ``messages`` or ``text`` from JSONL files, tokenised once.

    Only completions and assistant's turns are learned, with the model's chat template. Batches hold
    ``input_ids`` and ``labels``, both (rows, tokens), padded on the right to the longest row. The number of
    rows is filled up to a multiple of the ranks with empty rows that count for nothing, where a distributed
    sampler would repeat some: every rank runs the same number of batches, and each row counts once.

    Args:
        tokenizer: folder or hub id to take the tokenizer from; the model's own by default in recipes.
        train: JSONL file to learn from.
        validation: JSONL file to validate on.
        max_seq_len: longest row in tokens; longer ones are cut at their end.
        micro_batch_size: rows per rank and forward pass.
        validation_batch_size: rows per rank in validation; by default the same.
        pad_to_multiple: batches' lengths are multiples of this.
        max_train_rows: use only the first rows of the file.
        max_validation_rows: use only the first rows of the file.
        num_workers: processes that collate batches; rows lie in memory, so 0 is usually best.
    """

    def __init__(
        self,
        tokenizer: str,
        train: str,
        validation: str,
        max_seq_len: int = 1024,
        micro_batch_size: int = 1,
        validation_batch_size: int | None = None,
        pad_to_multiple: int = 8,
        max_train_rows: int | None = None,
        max_validation_rows: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.tokenizer_path = tokenizer
        self.files = {"train": Path(train), "validation": Path(validation)}
        self.limits = {"train": max_train_rows, "validation": max_validation_rows}
        self.max_seq_len = max_seq_len
        self.micro_batch_size = micro_batch_size
        self.validation_batch_size = validation_batch_size or micro_batch_size
        self.pad_to_multiple = pad_to_multiple
        self.num_workers = num_workers
        self.tokenizer: Any = None
        self.splits: dict[str, Split] = {}
        self.sample_conversations: list[list[Message]] = []
        """Of the first validation rows, each up to and with an assistant's last turn."""

    @override
    def setup(self, stage: str) -> None:
        """Read and tokenise both files, once; on a bad line every rank stops with the same error."""
        if not self.splits:
            self.splits = on_all_ranks(self._load)
            for name, split in self.splits.items():
                log.info("%s: %s", name, split)

    @override
    def train_dataloader(self) -> DataLoader[Example]:
        return self._loader("train", self.micro_batch_size, shuffle=True)

    @override
    def val_dataloader(self) -> DataLoader[Example]:
        return self._loader("validation", self.validation_batch_size, shuffle=False)

    def _load(self) -> dict[str, Split]:
        from transformers import AutoTokenizer

        rows = {name: read_rows(path)[: self.limits[name]] for name, path in self.files.items()}
        self.tokenizer = pretrained(AutoTokenizer, self.tokenizer_path)
        self.sample_conversations = _conversations(rows["validation"][:SAMPLES])
        return {name: self._encode(name, some) for name, some in rows.items()}

    def _encode(self, name: str, rows: list[Row]) -> Split:
        return make_split([encode(row, self.tokenizer) for row in rows], self.max_seq_len, self.files[name])

    def _loader(self, name: str, batch_size: int, *, shuffle: bool) -> DataLoader[Example]:
        ranks = self.trainer.world_size if self.trainer else 1
        examples = filled_up(self.splits[name].examples, ranks, self._pad_id)
        collate_fn = partial(collate, pad_id=self._pad_id, multiple=self.pad_to_multiple, longest=self.max_seq_len)
        return DataLoader(
            examples,  # type: ignore[arg-type]  # a list is a dataset
            batch_size=batch_size,
            shuffle=shuffle,
            collate_fn=collate_fn,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
        )

    @property
    def _pad_id(self) -> int:
        """Any token will do: padding is never learned, and nothing looks back at it."""
        pad = self.tokenizer.pad_token_id
        return int(self.tokenizer.eos_token_id or 0) if pad is None else int(pad)


def _conversations(rows: list[Row]) -> list[list[Message]]:
    found = []
    for row in rows:
        turns = list(row.messages or [])
        while turns and turns[-1]["role"] != "assistant":
            turns.pop()
        if len(turns) > 1:
            found.append(turns)
    return found
