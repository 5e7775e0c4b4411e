"""Which tokens are learned, against masks made by hand."""

import pytest
from tiny import CHAT_TEMPLATE, make_tokenizer

from lightning_shard.finetune.encode import IGNORED, encode
from lightning_shard.finetune.rows import Row

USER = {"role": "user", "content": "what is a list?"}
ASSISTANT = {"role": "assistant", "content": "A list."}


def learned_text(row: Row, **options: str | None) -> list[str]:
    """The learned stretches of a row, decoded."""
    tokenizer = make_tokenizer(**options)
    example = encode(row, tokenizer)
    assert len(example.input_ids) == len(example.labels)
    stretches: list[list[int]] = [[]]
    for token, label in zip(example.input_ids, example.labels, strict=True):
        if label == IGNORED:
            stretches.append([])
        else:
            assert label == token
            stretches[-1].append(token)
    return [tokenizer.decode(stretch) for stretch in stretches if stretch]


def test_the_completion_and_its_end_mark_are_learned() -> None:
    assert learned_text(Row(place="", messages=[USER, ASSISTANT])) == ["A list.<|im_end|>"]


def test_every_assistants_turn_is_learned_and_nothing_between() -> None:
    second = {"role": "assistant", "content": "a list is in order"}
    system = {"role": "system", "content": "A list."}
    row = Row(place="", messages=[system, USER, ASSISTANT, USER, second])
    assert learned_text(row) == ["A list.<|im_end|>", "a list is in order<|im_end|>"]


def test_mask_made_by_hand() -> None:
    tokenizer = make_tokenizer()
    example = encode(Row(place="", messages=[USER, ASSISTANT]), tokenizer)
    prompt = tokenizer("<|im_start|>user\nwhat is a list?<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    answer = tokenizer("A list.<|im_end|>")["input_ids"]
    after = tokenizer("\n")["input_ids"]
    assert example.input_ids == prompt + answer + after
    assert example.labels == [IGNORED] * len(prompt) + answer + [IGNORED] * len(after)
    assert example.num_label_tokens == len(answer)


def test_text_is_learned_whole_with_an_end_mark() -> None:
    example = encode(Row(place="", text="a list"), make_tokenizer())
    assert example.labels == example.input_ids
    assert make_tokenizer().decode(example.input_ids) == "a list<|im_end|>"
    assert example.num_label_tokens == len(example.input_ids) - 1  # nothing predicts the first


def test_a_model_without_a_chat_template() -> None:
    assert learned_text(Row(place="", messages=[USER, ASSISTANT]), chat_template=None) == ["A list.<|im_end|>"]


def test_a_template_that_rewrites_turns_is_refused_with_the_line() -> None:
    shortened = CHAT_TEMPLATE.replace("{{ message['content'] }}", "{{ message['content'] if loop.last else '...' }}")
    row = Row(place="data.jsonl, line 7", messages=[USER, ASSISTANT, USER, ASSISTANT])
    with pytest.raises(ValueError, match=r"data\.jsonl, line 7: the model's chat template rewrites turn 2"):
        encode(row, make_tokenizer(shortened))


def test_what_a_chat_template_does_not_take_is_named_by_its_line() -> None:
    strict = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}{{ m.content }}{% endfor %}"
    row = Row(place="rows.jsonl, line 7", messages=[USER, USER, ASSISTANT])
    with pytest.raises(ValueError, match=r"^rows\.jsonl, line 7: .*\(user, user, assistant\): alternate"):
        encode(row, make_tokenizer(strict))
    with pytest.raises(ValueError, match=r"line 7: the conversation begins with the assistant's turn"):
        encode(Row(place="rows.jsonl, line 7", messages=[ASSISTANT, USER]), make_tokenizer())
