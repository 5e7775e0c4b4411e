import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from tiny import make_model_folder, write_pairs

from lightning_shard.finetune import CausalLM, InstructionData
from lightning_shard.finetune.batches import collate
from lightning_shard.finetune.encode import IGNORED, Example
from lightning_shard.testing import RankError, run_ranks

LONG, SHORT = Example([1, 2, 3, 4, 5], [IGNORED, IGNORED, 3, 4, 5]), Example([6, 7], [IGNORED, 7])


def make_data(folder: Path, **options: int | None) -> InstructionData:
    train, validation = write_pairs(folder / "train.jsonl", 12), write_pairs(folder / "validation.jsonl", 7)
    model = str(make_model_folder(folder / "model"))
    return InstructionData(model, str(train), str(validation), **{"max_seq_len": 64, **options})  # type: ignore[arg-type]


def test_batches_are_padded_to_a_multiple_but_not_beyond_the_longest() -> None:
    batch = collate([(LONG,), (SHORT,)], pad_id=0, multiple=4, longest=64)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 0, 0, 0], [6, 7, 0, 0, 0, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 3, 4, 5, -100, -100, -100], [-100, 7] + [-100] * 6]
    assert collate([(LONG,), (SHORT,)], pad_id=0, multiple=4, longest=6)["input_ids"].shape == (2, 6)
    assert collate([(SHORT,)], pad_id=0, multiple=1, longest=6)["input_ids"].shape == (1, 2)


def test_truncation_is_counted_and_rows_with_nothing_to_learn_are_left_out(tmp_path: Path) -> None:
    data = make_data(tmp_path, max_seq_len=40)
    prompt = {"prompt": "what is a list? " * 20, "completion": "never reached"}
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write(json.dumps(prompt) + "\n")
    data.setup("fit")
    split = data.splits["train"]
    assert split.num_rows == 13
    assert split.num_left_out == 1
    assert split.num_truncated >= 1
    assert all(len(example.input_ids) <= 40 for example in split.examples)
    assert "1 left out with nothing to learn" in str(split)


def test_nothing_to_learn_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none of its 12 rows has a token to learn within max_seq_len=8.*Raise"):
        make_data(tmp_path, max_seq_len=8).setup("fit")


def test_answers_that_are_all_empty_are_an_error(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"prompt": "what?", "completion": " "}\n' * 3)
    with pytest.raises(ValueError, match="every answer in it is empty"):
        data.setup("fit")


def test_limits_and_what_the_planner_reads(tmp_path: Path) -> None:
    data = make_data(tmp_path, micro_batch_size=3, max_train_rows=5, max_validation_rows=2)
    data.setup("fit")
    assert [len(data.splits[name].examples) for name in ("train", "validation")] == [5, 2]
    assert (data.max_seq_len, data.micro_batch_size) == (64, 3)
    assert [turns[-1]["content"] for turns in data.sample_conversations] == ["a list 0", "a list a list 1"]


def validation_loss(folder: Path, model: str, devices: int, batch_size: int) -> float:
    options = {"max_seq_len": 64, "validation_batch_size": batch_size}
    data = InstructionData(model, str(folder / "train.jsonl"), str(folder / "validation.jsonl"), **options)  # type: ignore[arg-type]
    trainer = Trainer(accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", logger=False)
    trainer.validate(CausalLM(model), datamodule=data, verbose=False)
    return trainer.callback_metrics["val_loss"].item()


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_validation_is_exact_on_two_ranks(tmp_path: Path, batch_size: int) -> None:
    """Seven rows of unequal lengths: a distributed sampler would repeat one, a mean of means weigh them wrongly."""
    data = make_data(tmp_path)
    one = validation_loss(tmp_path, data.tokenizer_path, 1, 7)
    two = run_ranks(2, validation_loss, tmp_path, data.tokenizer_path, 2, batch_size)
    assert two == [pytest.approx(one, rel=1e-5)] * 2


def set_up(files: list[tuple[str, str]]) -> None:
    """Each rank reads its own files, as on nodes whose disks differ."""
    rank = torch.distributed.get_rank()
    model, train = files[rank]
    InstructionData(model, train, train).setup("fit")


def test_a_broken_line_on_one_rank_stops_all_ranks(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": \n')
    files = [(data.tokenizer_path, str(tmp_path / "train.jsonl")), (data.tokenizer_path, str(bad))]
    with pytest.raises(RankError, match=r"bad\.jsonl, line 2: not JSON"):
        run_ranks(2, set_up, files, timeout_s=60)
