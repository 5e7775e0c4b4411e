"""Where rows come from: a file, a folder that Hugging Face ``datasets`` wrote, or the hub."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Record = tuple[str, dict[str, Any]]
"""Where a row stands, for errors, and its values by column."""

LINES, TABLES = (".jsonl", ".ndjson", ".json"), {".parquet": "parquet", ".csv": "csv", ".tsv": "csv"}
KINDS = (
    "a JSONL, Parquet or CSV file, a folder of such files, a folder that `datasets.save_to_disk` wrote, or a hub id "
    "such as 'owner/name'"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One table of rows, read in its own order.

    JSON lines are read here, so that errors name the line; all else goes through Hugging Face ``datasets``.
    """

    path: str
    split: str = "train"
    """Of a data set that has several."""
    subset: str | None = None
    """Configuration of a data set on the hub that has several."""
    kept: bool = False
    """Download a data set of the hub once and keep it, for every rank and run, instead of reading it over the network
    anew."""

    def records(self, skip: int = 0) -> Iterator[Record]:
        """Every row after the first ``skip``, never more than a few in memory.

        Raises:
            ValueError: for what cannot be read; it names the line or row.
        """
        path = Path(self.path).expanduser()
        if path.suffix in LINES and path.is_file():
            records = _lines(path)
            for _ in zip(range(skip), records, strict=False):
                pass
            yield from records
            return
        if path.suffix in (*LINES, *TABLES) and not path.is_file():
            raise ValueError(f"There is no data file {self.path!r} (looked from {Path.cwd()}). Give {KINDS}. {RULE}")
        yield from self._table(path, skip)

    def table(self) -> Any:
        """The data set as one of ``datasets``, whose rows are read when they are asked for by number.

        Raises:
            ValueError: for what cannot be read.
        """
        return self._open(Path(self.path).expanduser(), streaming=False)

    def _table(self, path: Path, skip: int) -> Iterator[Record]:
        rows = self._open(path)
        try:
            for number, row in enumerate(rows.skip(skip) if skip else rows, start=skip + 1):
                yield f"{self.path}, row {number}", {key: value for key, value in row.items() if value is not None}
        except (
            OSError,
            ValueError,
            KeyError,
            RuntimeError,
        ) as error:  # what its readers raise: a broken file, a lost link
            raise self._unreadable(error) from error

    def _open(self, path: Path, *, streaming: bool = True) -> Any:
        try:
            import datasets
        except ImportError:
            raise ValueError(
                f"Reading {self.path!r} needs the package `datasets`. Install it: pip install 'lightning-shard[data]', or "
                "write the rows as JSONL."
            ) from None
        datasets.disable_progress_bars()
        try:
            if path.suffix in TABLES:
                options = {"sep": "\t"} if path.suffix == ".tsv" else {}
                kind = TABLES[path.suffix]
                return datasets.load_dataset(kind, data_files=str(path), split="train", streaming=streaming, **options)
            if _was_saved(path):
                return self._pick(datasets.load_from_disk(str(path)))
            remote = streaming and not (self.kept and not path.is_dir())
            return self._pick(datasets.load_dataset(self.path, self.subset, streaming=remote))
        except Exception as error:  # the hub, its file systems and every reader have kinds of their own
            raise self._unreadable(error) from error

    def _pick(self, found: Any) -> Any:
        if not isinstance(found, dict):
            return found
        if self.split not in found:
            raise ValueError(f"it has no split {self.split!r}, but {', '.join(map(repr, found))}")
        return found[self.split]

    def _unreadable(self, error: Exception) -> ValueError:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        return ValueError(
            f"The data {self.path!r} cannot be read (looked from {Path.cwd()}): {said}. Give {KINDS}, and name split and "
            "subset where there are several."
        )


def _was_saved(path: Path) -> bool:
    return any((path / name).is_file() for name in ("dataset_dict.json", "dataset_info.json", "state.json"))


def _lines(path: Path) -> Iterator[Record]:
    if path.suffix == ".json" and _is_list(path):
        for number, value in enumerate(json.loads(path.read_text("utf-8-sig")), start=1):
            yield f"{path}, row {number}", _object(value, f"{path}, row {number}")
        return
    for number, line in _decoded(path):
        place = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise broken(place, f"not JSON ({error.msg} at column {error.colno})") from None
        yield place, _object(value, place)


def _is_list(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")


def _decoded(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                place = f"{path}, line {number}"
                raise ValueError(f"{place}: not UTF-8 ({error.reason}). Save the file as UTF-8.") from None
            if line:
                yield number, line


def _object(value: Any, place: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise broken(place, f"a JSON {type(value).__name__} where an object is needed")
    return value


RULE = (
    "Each line is one JSON object (each row of a table has such columns) with the keys 'prompt' and 'completion', or "
    "'messages' (a list of {\"role\": ..., \"content\": ...} with an assistant's turn among them), or 'conversations' "
    "(the same with \"from\" and \"value\"), or 'instruction' and 'output' (and 'input'), or 'text'; every value is text. "
    "Other names are told by `columns`, as in {prompt: question, completion: answer}."
)


def broken(place: str, given: str) -> ValueError:
    """The error for a row that breaks the rule."""
    return ValueError(f"{place}: {given}. {RULE} Mend or delete this line.")
