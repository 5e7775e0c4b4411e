import json
from pathlib import Path

import pytest

from lightning_shard.finetune.rows import read_rows

GOOD = {"prompt": "what?", "completion": "that"}


def write(folder: Path, *lines: str | bytes) -> Path:
    file = folder / "data.jsonl"
    file.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))
    return file


def test_reads_the_three_kinds_of_rows(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    file = write(tmp_path, json.dumps(GOOD), "", json.dumps({"messages": turns}), json.dumps({"text": "plain"}))
    pair, chat, text = read_rows(file)
    assert pair.messages == [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "that"}]
    assert chat.messages == turns
    assert (text.text, text.messages) == ("plain", None)
    assert text.place == f"{file}, line 4"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "a", "completion": ', "not JSON (Expecting value at column 30)"),
        ('["a"]', "a JSON list where an object is needed"),
        ('{"question": "a", "answer": "b"}', "has the keys 'question', 'answer'"),
        ("{}", "has the keys of an empty object"),
        ('{"prompt": "a", "completion": 1}', "'completion' is int, not text"),
        ('{"prompt": "a"}', "has the keys 'prompt'"),
        ('{"messages": "a"}', "'messages' is not a list of objects"),
        ('{"messages": [{"role": "user"}]}', "'content' is missing"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no turn with the role 'assistant'"),
        ('{"messages": [{"role": "usr", "content": "a"}]}', "the role 'usr'; 'user' is meant"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistent", "content": "b"}]}',
            "'assistant' is meant",
        ),
        ('{"messages": [{"role": "Human", "content": "a"}]}', "'user' is meant"),
        (b'{"text": "\xff"}', "not UTF-8"),
    ],
)
def test_a_broken_line_is_named_with_the_rule_and_a_way_out(tmp_path: Path, line: str | bytes, said: str) -> None:
    file = write(tmp_path, json.dumps(GOOD), line)
    with pytest.raises(ValueError, match="line 2") as caught:
        read_rows(file)
    message = str(caught.value)
    assert message.startswith(f"{file}, line 2: ")
    assert said in message
    assert "UTF-8" in message or ("Each line is one JSON object" in message and "Mend or delete" in message)


def test_a_missing_or_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no data file .*absent\.jsonl.*'prompt' and 'completion'"):
        read_rows(tmp_path / "absent.jsonl")
    with pytest.raises(ValueError, match="holds no rows"):
        read_rows(write(tmp_path, "", ""))
