"""Where rows may come from, and what they may hold."""

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from lightning_shard.finetune.rows import read_rows, stream_rows
from lightning_shard.finetune.sources import Source

ROWS = [{"prompt": f"what is {i}?", "completion": f"it is {i}"} for i in range(7)]


def write(folder: Path, kind: str) -> Source:
    table = datasets.Dataset.from_list(ROWS)
    file = folder / f"data.{kind}"
    if kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    elif kind == "json":
        file.write_text(json.dumps(ROWS, indent=1))
    elif kind == "parquet":
        table.to_parquet(file)
    elif kind == "csv":
        table.to_csv(file)
    elif kind == "tsv":
        table.to_csv(file, sep="\t")
    elif kind == "saved":
        table.save_to_disk(file)
    elif kind == "saved-splits":
        datasets.DatasetDict({"train": table.select([0]), "rest": table}).save_to_disk(file)
        return Source(path=str(file), split="rest")
    elif kind == "folder":
        file.mkdir()
        table.to_parquet(file / "train.parquet")
    return Source(path=str(file))


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "csv", "tsv", "saved", "saved-splits", "folder"])
def test_every_kind_of_source_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    source = write(tmp_path, kind)
    rows = read_rows(source)
    assert [row.messages for row in rows] == [
        [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
        for row in ROWS
    ]
    assert [row.messages for row in stream_rows(source, skip=4)] == [row.messages for row in rows[4:]]
    assert len(read_rows(source, limit=3)) == 3


def test_a_split_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    path = write(tmp_path, "saved-splits").path
    with pytest.raises(ValueError, match=r"has no split 'validation', but 'train', 'rest'"):
        read_rows(Source(path=path, split="validation"))


def test_a_broken_table_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "data.parquet").write_bytes(b"not a table")
    with pytest.raises(ValueError, match=r"The data '.*data\.parquet' cannot be read"):
        read_rows(tmp_path / "data.parquet")


def test_a_row_of_a_table_is_named(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"text": "a"}, {"text": None}]).to_parquet(tmp_path / "data.parquet")
    with pytest.raises(ValueError, match=r"data\.parquet, row 2: has the keys of an empty object"):
        read_rows(tmp_path / "data.parquet")


TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}, TURNS),
        ({"conversations": TURNS}, TURNS),
        ({"instruction": "hi", "output": "hello"}, TURNS),
        ({"instruction": "hi", "input": "", "output": "hello"}, TURNS),
        (
            {"instruction": "add", "input": "1 2", "output": "3", "system": "be brief"},
            [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "add\n\n1 2"},
                {"role": "assistant", "content": "3"},
            ],
        ),
    ],
    ids=["sharegpt", "conversations-with-roles", "alpaca", "alpaca-no-input", "alpaca-input-system"],
)
def test_other_tools_rows(tmp_path: Path, row: dict[str, Any], messages: list[dict[str, str]]) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps(row))
    assert read_rows(tmp_path / "data.jsonl")[0].messages == messages


def test_columns_are_renamed(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps({"question": "hi", "answer": "hello", "id": 7}))
    assert (
        read_rows(tmp_path / "data.jsonl", columns={"prompt": "question", "completion": "answer"})[0].messages == TURNS
    )
    with pytest.raises(ValueError, match=r"line 1: has no column 'reply', which `columns` names"):
        read_rows(tmp_path / "data.jsonl", columns={"prompt": "question", "completion": "reply"})


@pytest.mark.parametrize("kept", [True, False])
def test_the_hub_is_asked_for_a_split_and_a_subset(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    asked: list[Any] = []

    def load_dataset(path: str, subset: str | None, *, streaming: bool) -> datasets.DatasetDict:
        asked.append((path, subset, streaming))
        return datasets.DatasetDict(
            {"train": datasets.Dataset.from_list(ROWS), "test": datasets.Dataset.from_list(ROWS[:2])}
        )

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    source = Source(path="owner/name", split="test", subset="english", kept=kept)
    assert len(read_rows(source)) == 2
    assert asked == [("owner/name", "english", not kept)]
