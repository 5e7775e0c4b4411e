"""What a user sees of the data before training."""

import json
from pathlib import Path

import pytest
from rich.console import Console
from tiny import make_model_folder, make_tokenizer, write_pairs

from lightning_shard.finetune import InstructionData
from lightning_shard.finetune.batches import make_split
from lightning_shard.finetune.describe import data_facts, describe_data, render_mask
from lightning_shard.finetune.encode import IGNORED, Example, encode
from lightning_shard.finetune.rows import Row

USER, ASSISTANT = {"role": "user", "content": "what is a list?"}, {"role": "assistant", "content": "A list."}


def test_what_is_learned_is_coloured_and_nothing_else() -> None:
    tokenizer = make_tokenizer()
    text = render_mask(encode(Row(place="", messages=[USER, ASSISTANT, USER, ASSISTANT]), tokenizer), tokenizer)
    question = "<|im_start|>user\nwhat is a list?<|im_end|>\n<|im_start|>assistant\n"
    assert text.plain == (question + "A list.<|im_end|>\n") * 2
    coloured = [text.plain[span.start : span.end] for span in text.spans if span.style == "green"]
    assert coloured == ["A list.<|im_end|>"] * 2


def test_a_long_example_is_shown_in_part() -> None:
    assert render_mask(Example([5] * 300, [5] * 300), make_tokenizer()).plain.endswith(" ... 44 more tokens")


def test_the_report_counts(tmp_path: Path) -> None:
    model = make_model_folder(tmp_path / "model")
    rows = write_pairs(tmp_path / "rows.jsonl", 12)
    with rows.open("a") as file:
        file.write(json.dumps({"prompt": "what is a list? " * 20, "completion": "never reached"}) + "\n")
        file.write(json.dumps({"prompt": "what?", "completion": ""}) + "\n")
    data = InstructionData(
        str(model), str(rows), validation_share=0.25, max_seq_len=48, global_batch_size=6, micro_batch_size=2
    )
    data.setup("fit")
    console = Console(width=400, record=True, force_terminal=True, color_system="standard")
    console.print(describe_data(data))
    shown = console.export_text(styles=False)
    split = data.splits["train"]
    assert f"{len(split.examples)} of {split.num_rows} rows, {split.num_tokens:,} tokens" in shown
    assert "% learned" in shown
    assert "6 rows of up to 48 tokens per optimizer step: 3 micro-batches of 2 on each of 1 ranks" in shown
    facts = data_facts(data)
    assert facts["train"]["rows"] + facts["validation"]["rows"] == 14
    assert sum(part["truncated"] for part in facts.values()) >= 1
    assert sum(part["left_out"] for part in facts.values()) == 1
    assert sum(part["empty"] for part in facts.values()) == 1
    longest = max(split.longest_row for split in data.splits.values())
    assert longest > 100
    assert f"the longest row has {longest} tokens: with data.max_seq_len={longest} none is cut" in shown
    assert f"rows with an empty answer: 1, the first is {rows}, line 14" in shown.replace("\n", "")
    assert facts["train"]["label_tokens"] == split.num_label_tokens < facts["train"]["tokens"]


LONG = Example(list(range(1, 11)), [IGNORED] * 7 + [8, 9, 10])


@pytest.mark.parametrize(
    ("truncation", "kept", "left_out"),
    [
        ("end", [], 1),
        ("start", [[7, 8, 9, 10]], 0),
        ("drop", [], 1),
        ("split", [[5, 6, 7, 8], [9, 10]], 0),
    ],
)
def test_truncation_policies(truncation: str, kept: list[list[int]], left_out: int) -> None:
    short = Example([1, 2], [1, 2])
    split = make_split([LONG, short], 4, "data", truncation=truncation)  # type: ignore[arg-type]
    assert [example.input_ids for example in split.examples] == [*kept, [1, 2]]
    assert (split.num_rows, split.num_truncated, split.num_left_out) == (2, 1, left_out)


def test_a_validation_share_is_the_same_rows_every_time(tmp_path: Path) -> None:
    model = str(make_model_folder(tmp_path / "model"))
    rows = str(write_pairs(tmp_path / "rows.jsonl", 20))
    splits = []
    for seed in (1, 1, 2):
        data = InstructionData(model, rows, validation_share=0.2, seed=seed)
        data.setup("fit")
        splits.append([tuple(example.input_ids) for example in data.splits["validation"].examples])
        everything = [*data.splits["train"].examples, *data.splits["validation"].examples]
        assert len({tuple(example.input_ids) for example in everything}) == 20
    assert len(splits[0]) == 4
    assert splits[0] == splits[1] != splits[2]
    with pytest.raises(ValueError, match=r"validation_share=0\.99 of the 20 rows .* leaves none to learn from"):
        InstructionData(model, rows, validation_share=0.99).setup("fit")
