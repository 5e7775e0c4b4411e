"""Rows of a JSONL file: what a line may hold, and errors that name the line."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Message = dict[str, str]

RULE = (
    "Each line is one JSON object with the keys 'prompt' and 'completion', or 'messages' "
    '(a list of {"role": ..., "content": ...} with an assistant\'s turn among them), or \'text\'; every value is text.'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One example: a conversation, or plain text."""

    place: str
    """Where it stands, for errors: file and line."""
    messages: list[Message] | None = None
    """Turns; the assistant's are learned."""
    text: str | None = None
    """Plain text, learned whole."""


def read_rows(path: Path) -> list[Row]:
    """All rows of a JSONL file, in order; empty lines are passed over.

    Raises:
        ValueError: for a file that is missing or holds no row, or a line that breaks the rule; it names the line.
    """
    if not path.is_file():
        where = f"There is no data file {str(path)!r} (looked from {Path.cwd()})"
        raise ValueError(f"{where}. Give the path of a JSONL file. {RULE}")
    rows = [_row(line, f"{path}, line {number}") for number, line in _lines(path)]
    if not rows:
        raise ValueError(f"{path} holds no rows. {RULE}")
    return rows


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                place = f"{path}, line {number}"
                raise ValueError(f"{place}: not UTF-8 ({error.reason}). Save the file as UTF-8.") from None
            if line:
                yield number, line


def _row(line: str, place: str) -> Row:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise _broken(place, f"not JSON ({error.msg} at column {error.colno})") from None
    if not isinstance(value, dict):
        raise _broken(place, f"a JSON {type(value).__name__} where an object is needed")
    if "messages" in value:
        return Row(place=place, messages=_messages(value["messages"], place))
    if "prompt" in value and "completion" in value:
        prompt, completion = _text(value, "prompt", place), _text(value, "completion", place)
        return Row(place=place, messages=[_message("user", prompt), _message("assistant", completion)])
    if "text" in value:
        return Row(place=place, text=_text(value, "text", place))
    raise _broken(place, f"has the keys {', '.join(map(repr, value)) or 'of an empty object'}")


def _messages(value: Any, place: str) -> list[Message]:
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise _broken(place, "'messages' is not a list of objects")
    turns = [_message(_text(turn, "role", place), _text(turn, "content", place)) for turn in value]
    if not any(turn["role"] == "assistant" for turn in turns):
        raise _broken(place, "'messages' has no turn with the role 'assistant', so there is nothing to learn")
    return turns


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _text(value: dict[str, Any], key: str, place: str) -> str:
    text = value.get(key)
    if not isinstance(text, str):
        given = f"{key!r} is missing" if key not in value else f"{key!r} is {type(text).__name__}, not text"
        raise _broken(place, given)
    return text


def _broken(place: str, given: str) -> ValueError:
    return ValueError(f"{place}: {given}. {RULE} Mend or delete this line.")
