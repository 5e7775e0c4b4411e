"""A row becomes tokens, with labels where it is to be learned."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning_shard.finetune.rows import Message, Row

IGNORED = -100
"""Label of a token that is not learned, as in torch's cross-entropy."""


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids and, position by position, their labels."""

    input_ids: list[int]
    labels: list[int]

    @property
    def num_label_tokens(self) -> int:
        """Tokens that are predicted: nothing predicts the first."""
        return sum(label != IGNORED for label in self.labels[1:])

    def cut(self, length: int) -> "Example":
        """The first ``length`` tokens."""
        return Example(self.input_ids[:length], self.labels[:length])


def encode(row: Row, tokenizer: Any) -> Example:
    """The tokens of a row: plain text is learned whole, of a conversation only the assistant's turns.

    A turn is learned from its first character to its end-of-turn mark. White space that the template puts
    after that mark is not learned, since generation has stopped by then.
    """
    if row.messages is None:
        ids = tokenizer(row.text)["input_ids"]
        ids = ids if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]
        return Example(ids, list(ids))
    if tokenizer.chat_template is None:
        text, spans, special = *_without_template(row, tokenizer), True
    else:
        text, spans, special = *_with_template(row, tokenizer), False
    return _label(tokenizer, text, spans, add_special_tokens=special)


def render_prompt(messages: list[Message], tokenizer: Any) -> str:
    """The text after which the assistant's next turn starts."""
    if tokenizer.chat_template is None:
        return "".join(f"{message['content']}\n" for message in messages)
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def _with_template(row: Row, tokenizer: Any) -> tuple[str, list[range]]:
    assert row.messages is not None
    text = str(tokenizer.apply_chat_template(row.messages, tokenize=False))

    def until(turn: int) -> str:
        assert row.messages is not None
        return str(tokenizer.apply_chat_template(row.messages[: turn + 1], tokenize=False))

    return text, list(_spans(row, text, lambda turn: render_prompt((row.messages or [])[:turn], tokenizer), until))


def _without_template(row: Row, tokenizer: Any) -> tuple[str, list[range]]:
    """Turns line by line; the assistant's end with the end-of-text mark."""
    assert row.messages is not None
    text, spans = "", []
    for message in row.messages:
        start = len(text)
        if message["role"] == "assistant":
            text += message["content"] + str(tokenizer.eos_token)
            spans.append(range(start, len(text)))
        else:
            text += message["content"] + "\n"
    return text, spans


def _spans(row: Row, text: str, before: Callable[[int], str], until: Callable[[int], str]) -> Iterator[range]:
    """Where in ``text`` each of the assistant's turns stands."""
    for turn, message in enumerate(row.messages or []):
        if message["role"] != "assistant":
            continue
        prompt, end = before(turn), until(turn)
        if not (text.startswith(end) and end.startswith(prompt)):
            raise ValueError(
                f"{row.place}: the model's chat template rewrites turn {turn + 1} once later turns follow, so it "
                "cannot be told which tokens are the assistant's. Give each of the assistant's turns as a row of its "
                "own that ends with it."
            )
        yield range(len(prompt), len(end.rstrip()))


def _label(tokenizer: Any, text: str, spans: list[range], *, add_special_tokens: bool) -> Example:
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not tell where in the text each token stands, which is needed to "
            "learn the assistant's turns alone. Use a model with a tokenizer.json, or rows with 'text'."
        )
    encoded = tokenizer(text, add_special_tokens=add_special_tokens, return_offsets_mapping=True)
    ids: list[int] = encoded["input_ids"]
    learned = [stop > start and any(start in span for span in spans) for start, stop in encoded["offset_mapping"]]
    return Example(ids, [token if learn else IGNORED for token, learn in zip(ids, learned, strict=True)])
