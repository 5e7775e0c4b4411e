"""The same run on one rank, on two, resumed, and in a plain loop without Lightning or this package."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import make_model_folder, write_pairs
from torch.nn import functional
from transformers import AutoModelForCausalLM

from lightning_shard.finetune import CausalLM, InstructionData
from lightning_shard.specs import AdapterSpec
from lightning_shard.testing import run_ranks

GLOBAL_BATCH, STEPS = 6, 20
REAL = Path(__file__).parents[2] / "runs/models/SmolLM2-135M-Instruct"
LORA = AdapterSpec(r=4, alpha=8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model_folder(tmp_path / "model")
    write_pairs(tmp_path / "rows.jsonl", 32)
    return tmp_path


class Losses(Callback):
    """The logged loss of every optimizer step."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.step = -1

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if "train_loss" in trainer.callback_metrics and trainer.global_step != self.step:
            self.step = trainer.global_step
            self.values.append(trainer.callback_metrics["train_loss"].item())


def make_data(folder: Path, **options: Any) -> InstructionData:
    given = {"max_seq_len": 64, "global_batch_size": GLOBAL_BATCH, **options}
    return InstructionData(str(folder / "model"), str(folder / "rows.jsonl"), **given)


def fit(
    folder: Path,
    ranks: int,
    strategy: str = "auto",
    *,
    data: dict[str, Any] | None = None,
    resume: Path | None = None,
    save_at: int | None = None,
    max_steps: int = STEPS,
    learning_rate: float = 1e-2,
) -> tuple[list[float], int, int]:
    """Losses by optimizer step, micro-batch and accumulation."""
    seed_everything(7, verbose=False)
    losses = Losses()
    saver = ModelCheckpoint(folder / "saved", filename="at-{step}", every_n_train_steps=save_at, save_top_k=-1)
    trainer = Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=strategy,
        max_steps=max_steps,
        callbacks=[losses, saver] if save_at else [losses],
        enable_checkpointing=save_at is not None,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = CausalLM(str(folder / "model"), LORA, learning_rate=learning_rate, warmup_steps=2)
    datamodule = make_data(folder, **(data or {}))
    trainer.fit(module, datamodule=datamodule, ckpt_path=resume, weights_only=True)
    return losses.values, datamodule.micro_batch_size or 0, trainer.accumulate_grad_batches


def plain_loop(folder: Path, learning_rate: float = 1e-2, global_batch: int = GLOBAL_BATCH) -> list[float]:
    """peft and AdamW by hand, on the same batches."""
    from peft import LoraConfig, get_peft_model
    from transformers import get_cosine_schedule_with_warmup

    import lightning_shard

    seed_everything(7, verbose=False)
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    start = lightning_shard.lora(base, r=4, lora_alpha=8, task_type="CAUSAL_LM", seed=7).state_dict()
    model.load_state_dict(start)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0)
    schedule = get_cosine_schedule_with_warmup(optimizer, 2, STEPS)
    data = make_data(folder, global_batch_size=global_batch, micro_batch_size=global_batch)
    data.setup("fit")
    losses: list[float] = []
    epoch = 0
    while len(losses) < STEPS:
        data.progress = lambda epoch=epoch: (epoch, 0)  # type: ignore[method-assign]
        for batch in data.train_dataloader():
            logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
            loss = functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), ignore_index=-100)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == STEPS:
                break
        epoch += 1
    return losses


@pytest.mark.parametrize("strategy", [pytest.param("auto-shard", marks=pytest.mark.slow), "fsdp2"])
def test_lora_on_two_ranks_follows_a_plain_peft_loop(folder: Path, strategy: str) -> None:
    expected = plain_loop(folder)
    assert expected[-1] < expected[0] - 0.2
    for losses, micro, accumulate in run_ranks(2, fit, folder, 2, strategy):
        assert (micro, accumulate) == (1, 3)
        assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(not REAL.is_dir(), reason="the pretrained model is fetched by recipes/get_smollm2.py")
def test_lora_on_a_pretrained_model_follows_a_plain_peft_loop(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(REAL)
    (tmp_path / "rows.jsonl").symlink_to(REAL.parents[1] / "data/python-docs/train.jsonl")
    expected = plain_loop(tmp_path, 1e-3, 2)
    assert sum(expected[-5:]) < sum(expected[:5]) - 1.0
    options = {"learning_rate": 1e-3, "data": {"global_batch_size": 2}}
    for losses, *_ in run_ranks(2, fit, tmp_path, 2, "auto-shard", timeout_s=900, **options):
        assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param({"micro_batch_size": 2}, marks=pytest.mark.slow),
        {"packing": True},
        pytest.param({"group_by_length": True}, marks=pytest.mark.slow),
        pytest.param({"streaming": True}, marks=pytest.mark.slow),
    ],
    ids=["larger-micro-batch", "packed", "grouped", "streamed"],
)
def test_the_number_of_ranks_changes_nothing(folder: Path, data: dict[str, Any]) -> None:
    expected, *_ = fit(folder, 1, data=data, max_steps=8)
    for losses, *_ in run_ranks(2, fit, folder, 2, "tuned-ddp", data=data, max_steps=8):
        assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("data", "ranks"),
    [
        ({}, 2),
        *(
            pytest.param(data, ranks, marks=pytest.mark.slow)
            for data in ({"packing": True}, {"streaming": True}, {"streaming": True, "packing": True})
            for ranks in (1, 2)
        ),
    ],
)
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(folder: Path, data: dict[str, Any], ranks: int) -> None:
    """Saved in the middle of the second epoch by one rank; resumed on one and on two."""
    expected, *_ = fit(folder, 1, data=data, save_at=8, max_steps=12)
    strategy = "tuned-ddp" if ranks > 1 else "auto"
    options: dict[str, Any] = {"data": data, "resume": folder / "saved" / "at-step=8.ckpt", "max_steps": 12}
    for losses, *_ in run_ranks(ranks, fit, folder, ranks, strategy, **options):
        assert len(losses) == 4
        assert losses == pytest.approx(expected[-4:], rel=1e-4)


@pytest.mark.parametrize("save_at", [6, 8], ids=["end-of-epoch", "within"])
@pytest.mark.parametrize("data", [{}, {"streaming": True}], ids=["plain", "streamed"])
def test_a_resumed_run_may_cut_its_steps_otherwise(folder: Path, data: dict[str, Any], save_at: int) -> None:
    expected, *_ = fit(folder, 1, data=data, save_at=save_at, max_steps=12)
    resume = folder / "saved" / f"at-step={save_at}.ckpt"
    losses, *cut = fit(folder, 1, data={"micro_batch_size": 2, **data}, resume=resume, max_steps=12)
    assert cut == [2, 3]
    assert losses == pytest.approx(expected[save_at:], rel=1e-4)


def test_the_planner_picks_the_micro_batch(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "lightning_shard"):
        losses, micro, accumulate = fit(folder, 1, "auto-shard", data={"micro_batch_size": None}, max_steps=3)
    assert micro * accumulate == GLOBAL_BATCH
    assert f"Micro-batch of {micro} rows" in caplog.text
    assert losses == pytest.approx(fit(folder, 1, max_steps=3)[0], rel=1e-4)


def test_a_micro_batch_left_open_needs_a_global_batch(folder: Path) -> None:
    with pytest.raises(
        ValueError, match=r"data\.micro_batch_size is left to the planner.*Give data\.global_batch_size"
    ):
        fit(folder, 1, data={"micro_batch_size": None, "global_batch_size": None})


def test_a_batch_in_tokens_is_a_number_of_rows(folder: Path) -> None:
    plain, packed = (
        make_data(folder, global_batch_size=None, global_batch_tokens=640, packing=p) for p in (False, True)
    )
    for data in (plain, packed):
        data.setup("fit")
    split = plain.splits["train"]
    assert plain.rows_per_step() == round(640 / (split.num_tokens / len(split.examples)))
    assert packed.rows_per_step() == 10


def test_two_answers_to_how_much_to_accumulate_are_refused(folder: Path) -> None:
    data = make_data(folder)
    trainer = Trainer(accelerator="cpu", devices=1, accumulate_grad_batches=4, logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match=r"accumulate_grad_batches=4 and a global batch size both say"):
        trainer.fit(CausalLM(str(folder / "model")), datamodule=data)


def test_a_stream_needs_a_number_of_steps(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"Say how long to train: trainer\.max_steps"):
        fit(folder, 1, data={"streaming": True}, max_steps=-1)
