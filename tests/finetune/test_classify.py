"""Classifiers of texts and images."""

from pathlib import Path

import pytest
from lightning.pytorch import Trainer, seed_everything
from tiny import make_encoder, write_rows

from lightning_shard.finetune import LabelledText, TextClassifier
from lightning_shard.finetune.encode import IGNORED
from lightning_shard.specs import AdapterSpec
from lightning_shard.testing import run_ranks


def accuracy(folder: Path, ranks: int, strategy: str, *, lora: bool) -> tuple[float, float, float]:
    """Losses before and after, and the share of right answers."""
    seed_everything(3, verbose=False)
    data = LabelledText(
        str(folder / "model"), str(folder / "rows.jsonl"), global_batch_size=8, micro_batch_size=2, max_seq_len=32
    )
    module = TextClassifier(str(folder / "model"), AdapterSpec(r=4) if lora else None, learning_rate=1e-2)
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = Trainer(accelerator="cpu", devices=ranks, strategy=strategy, max_epochs=10, **quiet)
    trainer.validate(module, data, verbose=False)
    before = trainer.callback_metrics["val_loss"].item()
    trainer.fit(module, data)
    trainer.validate(module, data, verbose=False)
    return before, trainer.callback_metrics["val_loss"].item(), trainer.callback_metrics["val_accuracy"].item()


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_labels_are_learned(tmp_path: Path, lora: bool) -> None:
    make_encoder(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl")
    before, after, right = accuracy(tmp_path, 1, "auto", lora=lora)
    assert after < 0.5 * before
    assert right == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto-shard", "fsdp2"])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_two_ranks_learn_the_same(tmp_path: Path, strategy: str, lora: bool) -> None:
    make_encoder(tmp_path / "model")
    write_rows(tmp_path / "rows.jsonl")
    expected = accuracy(tmp_path, 1, "auto", lora=lora)
    for found in run_ranks(2, accuracy, tmp_path, 2, strategy, lora=lora):
        assert found == pytest.approx(expected, rel=1e-2, abs=1e-3)


def test_batches_and_labels(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a list", "label": 10}\n{"text": "what", "label": 9}\n')
    data = LabelledText(make_encoder(tmp_path / "model"), str(tmp_path / "rows.jsonl"), micro_batch_size=3)
    data.setup("fit")
    assert data.label_names == ["9", "10"]  # by value, not by letter
    (batch,) = list(data.val_dataloader())
    assert batch["labels"].tolist() == [1, 0, IGNORED]
    assert batch["attention_mask"].sum(1).tolist() == [len(ids) for ids, _ in data.rows["validation"]] + [1]


def test_a_row_without_a_label_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a list", "label": 1}\n{"text": "a list"}\n')
    data = LabelledText(make_encoder(tmp_path / "model"), str(tmp_path / "rows.jsonl"))
    with pytest.raises(ValueError, match=r"line 2: needs a text in 'text' and a word or whole number in 'label'"):
        data.setup("fit")


def test_a_label_that_no_training_row_has_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "a", "label": "x"}\n')
    (tmp_path / "other.jsonl").write_text('{"text": "a", "label": "y"}\n')
    data = LabelledText(make_encoder(tmp_path / "model"), str(tmp_path / "train.jsonl"), str(tmp_path / "other.jsonl"))
    with pytest.raises(ValueError, match=r"other\.jsonl has labels that no training row has: y"):
        data.setup("fit")
