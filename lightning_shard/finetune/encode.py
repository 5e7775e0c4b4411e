"""A row becomes tokens, with labels where it is to be learned."""

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

    def part(self, start: int, stop: int) -> "Example":
        """The tokens from ``start`` up to ``stop``."""
        return Example(self.input_ids[start:stop], self.labels[start:stop])


def encode(row: Row, tokenizer: Any) -> Example:
    """The tokens of a row: plain text is learned whole, of a conversation only the assistant's turns.

    A turn is learned from its first character to its end-of-turn mark. White space that the template puts
    after that mark is not learned, since generation has stopped by then.

    Raises:
        ValueError: when the tokenizer or its chat template cannot tell which tokens are the assistant's.
    """
    if row.messages is None:
        ids = tokenizer(row.text)["input_ids"]
        ids = ids if ids and ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]
        return Example(ids, list(ids))
    text, spans = _rendered(row.messages, row.place, tokenizer)
    return _label(tokenizer, text, spans, add_special_tokens=tokenizer.chat_template is None)


def render(messages: list[Message], tokenizer: Any, *, answer_next: bool = False) -> str:
    """A conversation as the model reads it, up to where the assistant's next turn starts if that is next.

    A tokenizer without a chat template gets plain lines, the assistant's ended by the end-of-text mark.
    """
    if tokenizer.chat_template is None:
        ends = {"assistant": str(tokenizer.eos_token)}
        return "".join(message["content"] + ends.get(message["role"], "\n") for message in messages)
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer_next))


def _rendered(messages: list[Message], place: str, tokenizer: Any) -> tuple[str, list[range]]:
    """The whole conversation, and where in it each of the assistant's turns stands."""
    text = _render(messages, place, tokenizer)
    spans = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(messages[:turn], place, tokenizer, answer_next=True)
        through = _render(messages[: turn + 1], place, tokenizer)
        if not (text.startswith(through) and through.startswith(before)):
            raise ValueError(
                f"{place}: the model's chat template rewrites turn {turn + 1} once later turns follow, so it cannot be "
                "told which tokens are the assistant's. Give each of the assistant's turns as a row of its own that "
                "ends with it."
            )
        spans.append(range(len(before), len(through.rstrip())))
    return text, spans


def _render(messages: list[Message], place: str, tokenizer: Any, *, answer_next: bool = False) -> str:
    """As :func:`render`, with an error that says where the conversation stands."""
    from jinja2 import TemplateError

    if not messages and tokenizer.chat_template is not None:
        raise ValueError(
            f"{place}: the conversation begins with the assistant's turn, so there is nothing that it answers. Put the "
            "user's turn before it, or leave it out."
        )
    try:
        return render(messages, tokenizer, answer_next=answer_next)
    except (TemplateError, ValueError, TypeError) as error:
        turns = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"{place}: the model's chat template does not take these turns ({turns}): {error}. Most templates want user and "
            "assistant in turn, some no system's."
        ) from error


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
