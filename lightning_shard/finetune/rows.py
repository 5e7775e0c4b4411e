"""What a row may hold: a conversation in one of four forms, or plain text."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from lightning_shard.finetune.sources import RULE, Source, broken

Message = dict[str, str]

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}
"""ShareGPT's words for who speaks; others (user, assistant, system, tool) stand as they are."""
ROLES = ("system", "user", "assistant", "tool", "developer", "function", "ipython")
"""What chat templates know; others may be known to one, unless they look like one of these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One example: a conversation, or plain text."""

    place: str
    """Where it stands, for errors: file and line."""
    messages: list[Message] | None = None
    """Turns; the assistant's are learned."""
    text: str | None = None
    """Plain text, learned whole."""

    @property
    def answers_nothing(self) -> bool:
        """Whether every turn of the assistant's is empty."""
        turns = [turn["content"] for turn in self.messages or () if turn["role"] == "assistant"]
        return bool(turns) and not any(content.strip() for content in turns)


def read_rows(
    source: str | Path | Source, limit: int | None = None, columns: Mapping[str, str] | None = None
) -> list[Row]:
    """The first ``limit`` rows of a source, or all, in order; empty lines are passed over.

    Args:
        source: a path, or more about it.
        limit: how many rows at most.
        columns: of a row's own names, which stand for which of ours.

    Raises:
        ValueError: for a source that is missing or holds no row, or a row that breaks the rule; it names the line.
    """
    source = source if isinstance(source, Source) else Source(path=str(source))
    rows = list(islice(stream_rows(source, columns=columns), limit))
    if not rows:
        raise ValueError(f"{source.path} holds no rows. {RULE}")
    return rows


def stream_rows(source: Source, skip: int = 0, columns: Mapping[str, str] | None = None) -> Iterator[Row]:
    """One row after the other, after the first ``skip``."""
    for place, value in source.records(skip):
        yield parse_row(_renamed(value, columns, place), place)


def parse_row(value: Mapping[str, Any], place: str) -> Row:
    """A row from its values by name.

    Raises:
        ValueError: when it breaks the rule.
    """
    for key, turns in (("messages", _messages), ("conversations", _sharegpt)):
        if key in value:
            return Row(place=place, messages=_conversation(turns(value[key], place), key, place))
    if "prompt" in value and "completion" in value:
        return _pair(_text(value, "prompt", place), _text(value, "completion", place), place)
    if "instruction" in value and "output" in value:
        return _alpaca(value, place)
    if "text" in value:
        return Row(place=place, text=_text(value, "text", place))
    raise broken(place, f"has the keys {', '.join(map(repr, value)) or 'of an empty object'}")


def _renamed(value: dict[str, Any], columns: Mapping[str, str] | None, place: str) -> dict[str, Any]:
    if not columns:
        return value
    missing = [name for name in columns.values() if name not in value]
    if missing:
        raise broken(place, f"has no column {', '.join(map(repr, missing))}, which `columns` names")
    return {ours: value[theirs] for ours, theirs in columns.items()}


def _pair(prompt: str, completion: str, place: str) -> Row:
    return Row(place=place, messages=[_message("user", prompt), _message("assistant", completion)])


def _alpaca(value: Mapping[str, Any], place: str) -> Row:
    """The instruction, and below it the input where there is one, as the user's turn."""
    prompt = _text(value, "instruction", place)
    more = _text(value, "input", place) if "input" in value else ""
    row = _pair(f"{prompt}\n\n{more}" if more.strip() else prompt, _text(value, "output", place), place)
    assert row.messages is not None
    if "system" in value and value["system"]:
        row.messages.insert(0, _message("system", _text(value, "system", place)))
    return row


def _messages(value: Any, place: str) -> list[Message]:
    return [
        _message(_text(turn, "role", place), _text(turn, "content", place)) for turn in _turns(value, "messages", place)
    ]


def _sharegpt(value: Any, place: str) -> list[Message]:
    turns = _turns(value, "conversations", place)
    if all("role" in turn for turn in turns):
        return _messages(value, place)
    speakers = [_text(turn, "from", place) for turn in turns]
    return [
        _message(SHAREGPT_ROLES.get(speaker, speaker), _text(turn, "value", place))
        for speaker, turn in zip(speakers, turns, strict=True)
    ]


def _turns(value: Any, key: str, place: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
        raise broken(place, f"{key!r} is not a list of objects")
    return value


def _conversation(turns: list[Message], key: str, place: str) -> list[Message]:
    for turn in turns:
        meant = _meant(turn["role"])
        if meant is not None:
            raise broken(place, f"{key!r} has a turn with the role {turn['role']!r}; {meant!r} is meant, it seems")
    if not any(turn["role"] == "assistant" for turn in turns):
        raise broken(place, f"{key!r} has no turn with the role 'assistant', so there is nothing to learn")
    return turns


def _meant(role: str) -> str | None:
    """The role that one of another spelling stands for; None for one that may stand."""
    if role in ROLES:
        return None
    plain = role.strip().lower()
    return SHAREGPT_ROLES.get(plain) or next(iter(difflib.get_close_matches(plain, ROLES, n=1, cutoff=0.8)), None)


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _text(value: Mapping[str, Any], key: str, place: str) -> str:
    text = value.get(key)
    if not isinstance(text, str):
        given = f"{key!r} is missing" if key not in value else f"{key!r} is {type(text).__name__}, not text"
        raise broken(place, given)
    return text
