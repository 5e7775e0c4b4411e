"""The tables of README.md, from the result files: between a begin and an end mark per benchmark."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import NAMES, Row, load
from benchmarks.results import HERE, read

README = HERE / "README.md"


def write_tables(folder: str, readme: Path = README) -> None:
    """Replace what stands between the marks of every benchmark that has results."""
    text = readme.read_text()
    for name in NAMES:
        rows = read(name, folder)
        if rows:
            text = _between_marks(text, name, "\n\n".join([*load(name).tables(rows), _made_by(rows)]))
    readme.write_text(text)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown; the first column is text, the others are figures."""
    head = f"| {' | '.join(columns)} |"
    line = "|" + "|".join(["---", *["--:"] * (len(columns) - 1)]) + "|"
    return "\n".join([head, line, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def _made_by(rows: list[Row]) -> str:
    """Dates, commits and commands behind a benchmark's tables."""
    dates: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        dates.setdefault((row["commit"], row["command"]), []).append(row["date"])
    versions = ", ".join(f"{name} {version}" for name, version in rows[-1]["versions"].items())
    lines = [f"- {min(when)} UTC, package at {commit}: `{command}`" for (commit, command), when in dates.items()]
    return "\n".join([f"<sub>{versions}</sub>", "", "<details><summary>Runs</summary>", "", *lines, "", "</details>"])


def _between_marks(text: str, name: str, body: str) -> str:
    pattern = re.compile(rf"(<!-- {name}: made by `python -m benchmarks tables` -->\n).*?(<!-- end {name} -->)", re.S)
    if not pattern.search(text):
        raise ValueError(f"README.md has no marks for {name}.")
    return pattern.sub(lambda found: f"{found[1]}{body}\n{found[2]}", text)
