"""Texts and images with labels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_shard.finetune.dealt import DealtData
from lightning_shard.finetune.encode import IGNORED
from lightning_shard.finetune.hub import pretrained
from lightning_shard.finetune.limits import require_at_least
from lightning_shard.finetune.sources import Record, Source
from lightning_shard.parallelize.together import on_all_ranks

Labelled = tuple[Any, int]
"""Tokens of a text, or where an image stands in its table; and the number of its label."""


class _Labelled(DealtData):
    """Rows with labels, of which a known number may be used, and what turns them into the model's inputs."""

    has_validation = True

    def __init__(self, processor_path: str, limits: dict[str, int | None], **dealt: Any) -> None:
        super().__init__(shuffle=True, **dealt)
        require_at_least(1, **{f"data.max_{name}_rows": limit for name, limit in limits.items()})
        self.processor_path = processor_path
        self.limits = limits
        self.processor: Any = None
        self.label_names: list[str] = []


class LabelledText(_Labelled):
    """Texts with labels from JSONL, Parquet or CSV files, folders or the hub, tokenised once.

    Batches hold ``input_ids`` and ``attention_mask`` (rows, tokens), padded to the longest row, and ``labels`` (rows,).

    Args:
        tokenizer: folder or hub id to take the tokenizer from; the model's own by default in recipes.
        train: file, folder or hub id to learn from.
        validation: the same to validate on; by default another split of ``train``.
        train_split: split of a data set that has several.
        validation_split: the same for validation.
        text_column: name of the text.
        label_column: name of the label: a word or a whole number.
        max_seq_len: longest row in tokens; longer ones are cut at their end.
        micro_batch_size: rows per rank and forward pass.
        global_batch_size: rows per optimizer step over all ranks; sets the Trainer's ``accumulate_grad_batches``.
        validation_batch_size: rows per rank in validation; by default the same.
        max_train_rows: use only the first rows.
        max_validation_rows: use only the first rows.
        num_workers: processes that collate batches.
        seed: of the order.

    Raises:
        ValueError: for a value out of range, or a row without text or label.
    """

    def __init__(
        self,
        tokenizer: str,
        train: str,
        validation: str | None = None,
        train_split: str = "train",
        validation_split: str = "train",
        text_column: str = "text",
        label_column: str = "label",
        max_seq_len: int = 512,
        micro_batch_size: int = 16,
        global_batch_size: int | None = None,
        validation_batch_size: int | None = None,
        max_train_rows: int | None = None,
        max_validation_rows: int | None = None,
        num_workers: int = 0,
        seed: int = 42,
    ) -> None:
        super().__init__(
            tokenizer,
            {"train": max_train_rows, "validation": max_validation_rows},
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            validation_batch_size=validation_batch_size,
            num_workers=num_workers,
            seed=seed,
        )
        require_at_least(1, **{"data.max_seq_len": max_seq_len})
        self.sources = {
            "train": Source(path=train, split=train_split, kept=True),
            "validation": Source(path=validation or train, split=validation_split, kept=True),
        }
        self.text_column, self.label_column = text_column, label_column
        self.max_seq_len = max_seq_len
        self.rows: dict[str, list[Labelled]] = {}

    @override
    def setup(self, stage: str) -> None:
        if self.processor is None:
            self.rows = on_all_ranks(self._load)

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        rows = self.rows["train"]
        return self.training_loader(rows, [0] * len(rows), self._nothing, self._collate)

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        return self.validation_loader(self.rows["validation"], self._nothing, self._collate)

    def require_rows(self, number: int) -> None:
        """Raise ValueError where one of the first rows has no text or label."""
        for name in self.sources:
            self._read(name, number)

    def _load(self) -> dict[str, list[Labelled]]:
        from transformers import AutoTokenizer

        processor = pretrained(AutoTokenizer, self.processor_path)
        read = {name: self._read(name, self.limits[name]) for name in self.sources}
        self.label_names = sorted({label for _, label in read["train"]}, key=_as_number_or_word)
        numbers = {name: number for number, name in enumerate(self.label_names)}
        unknown = sorted({label for _, label in read["validation"]} - set(numbers))
        if unknown:
            raise ValueError(
                f"{self.sources['validation'].path} has labels that no training row has: {', '.join(unknown)}. Correct them, "
                "or add rows to learn them from."
            )
        self.processor = processor
        return {name: [(self._tokens(text), numbers[label]) for text, label in rows] for name, rows in read.items()}

    def _tokens(self, text: str) -> list[int]:
        ids: list[int] = self.processor(text, truncation=True, max_length=self.max_seq_len)["input_ids"]
        return ids

    def _read(self, name: str, limit: int | None) -> list[tuple[str, str]]:
        rows: list[tuple[str, str]] = []
        for record in self.sources[name].records():
            if limit is not None and len(rows) >= limit:
                break
            rows.append(self._text_and_label(record))
        if not rows:
            raise ValueError(f"{self.sources[name].path} holds no rows. Each needs a text and a label.")
        return rows

    def _text_and_label(self, record: Record) -> tuple[str, str]:
        place, values = record
        text, label = values.get(self.text_column), values.get(self.label_column)
        if not isinstance(text, str) or isinstance(label, bool) or not isinstance(label, (str, int)):
            raise ValueError(
                f"{place}: needs a text in {self.text_column!r} and a word or whole number in {self.label_column!r}, and has "
                f"{', '.join(map(repr, values))}. Name them by data.text_column and data.label_column."
            )
        return text, str(label)

    @property
    def _nothing(self) -> Labelled:
        return [self._pad_id], IGNORED

    @property
    def _pad_id(self) -> int:
        return int(self.processor.pad_token_id or 0)

    def _collate(self, rows: Sequence[Labelled]) -> dict[str, Tensor]:
        length = max(len(ids) for ids, _ in rows)
        length = min(-(-length // 8) * 8, max(length, self.max_seq_len))
        return {
            "input_ids": torch.tensor([ids + [self._pad_id] * (length - len(ids)) for ids, _ in rows]),
            "attention_mask": torch.tensor([[1] * len(ids) + [0] * (length - len(ids)) for ids, _ in rows]),
            "labels": torch.tensor([label for _, label in rows]),
        }


class LabelledImages(_Labelled):
    """Images with labels through Hugging Face ``datasets``: a folder with one sub-folder per label, or the hub.

    Batches hold ``pixel_values`` (rows, channels, height, width) as the model's own image processor makes them, and
    ``labels`` (rows,). Images are decoded when they are needed.

    Args:
        processor: folder or hub id to take the image processor from; the model's own by default in recipes.
        train: folder or hub id to learn from.
        train_split: split to learn from.
        validation_split: split to validate on.
        image_column: name of the image.
        label_column: name of the label.
        micro_batch_size: images per rank and forward pass.
        global_batch_size: images per optimizer step over all ranks; sets the Trainer's ``accumulate_grad_batches``.
        validation_batch_size: images per rank in validation; by default the same.
        max_train_rows: use only the first images.
        max_validation_rows: use only the first images.
        num_workers: processes that decode images.
        seed: of the order.

    Raises:
        ValueError: for a value out of range, or data without such columns.
    """

    def __init__(
        self,
        processor: str,
        train: str,
        train_split: str = "train",
        validation_split: str = "validation",
        image_column: str = "image",
        label_column: str = "label",
        micro_batch_size: int = 32,
        global_batch_size: int | None = None,
        validation_batch_size: int | None = None,
        max_train_rows: int | None = None,
        max_validation_rows: int | None = None,
        num_workers: int = 4,
        seed: int = 42,
    ) -> None:
        super().__init__(
            processor,
            {"train": max_train_rows, "validation": max_validation_rows},
            micro_batch_size=micro_batch_size,
            global_batch_size=global_batch_size,
            validation_batch_size=validation_batch_size,
            num_workers=num_workers,
            seed=seed,
        )
        self.path = train
        self.splits = {"train": train_split, "validation": validation_split}
        self.image_column, self.label_column = image_column, label_column
        self.tables: dict[str, Any] = {}

    @override
    def setup(self, stage: str) -> None:
        if self.processor is None:
            self.tables = on_all_ranks(self._load)

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        number = len(self.tables["train"])
        return self.training_loader(range(number), [0] * number, None, self._collate_of("train"))

    @override
    def val_dataloader(self) -> DataLoader[Any]:
        return self.validation_loader(range(len(self.tables["validation"])), None, self._collate_of("validation"))

    def require_rows(self, number: int) -> None:
        """Raise ValueError where the folder is not there; a data set is opened when the run starts."""
        folder = Path(self.path).expanduser()
        if (self.path.count("/") > 1 or self.path.startswith((".", "/", "~"))) and not folder.is_dir():
            raise ValueError(
                f"There is no folder {self.path!r} (looked from {Path.cwd()}). Give a folder with one sub-folder of images per "
                "label, below one folder per split, or a hub id."
            )

    def _load(self) -> dict[str, Any]:
        from transformers import AutoImageProcessor

        tables = {name: self._open(name) for name in self.splits}
        self.label_names = [str(name) for name in tables["train"].features[self.label_column].names]
        self.processor = pretrained(AutoImageProcessor, self.processor_path)
        return tables

    def _open(self, name: str) -> Any:
        table = Source(path=self.path, split=self.splits[name]).table()
        missing = [column for column in (self.image_column, self.label_column) if column not in table.features]
        if missing or not hasattr(table.features[self.label_column], "names"):
            raise ValueError(
                f"{self.path} has the columns {', '.join(table.features)}: an image in {self.image_column!r} and a label of a "
                f"known set in {self.label_column!r} are needed. Name them by data.image_column and data.label_column."
            )
        limit = self.limits[name]
        return table if limit is None else table.select(range(min(limit, len(table))))

    def _collate_of(self, name: str) -> Any:
        table = self.tables[name]

        def collate(indices: Sequence[int | None]) -> dict[str, Tensor]:
            rows = [table[0 if i is None else i] for i in indices]
            images = [row[self.image_column].convert("RGB") for row in rows]
            labels = [IGNORED if i is None else row[self.label_column] for i, row in zip(indices, rows, strict=True)]
            pixels = self.processor(images, return_tensors="pt")["pixel_values"]
            return {"pixel_values": pixels, "labels": torch.tensor(labels)}

        return collate


def _as_number_or_word(label: str) -> tuple[bool, int, str]:
    """Sorts numbers by value, before words by letter."""
    number = label.lstrip("-").isdigit()
    return not number, int(label) if number else 0, label
