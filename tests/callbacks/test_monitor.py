"""ShardMonitor keeps what was promised beside what was measured."""

import json
from pathlib import Path

import pytest
from helpers.llama import TinyLlama, make_tokens
from lightning.pytorch import Trainer

from lightning_shard.callbacks import ShardMonitor
from lightning_shard.testing import run_ranks


def fit(folder: str, accumulate: int) -> None:
    monitor = ShardMonitor(f"{folder}/monitor.json", warm_up=1, report_after=2)
    trainer = Trainer(
        strategy="auto-shard", accelerator="cpu", devices=2, max_steps=4, callbacks=[monitor], logger=False,
        accumulate_grad_batches=accumulate, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(TinyLlama("lora"), make_tokens(trainer.global_rank, 2))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_plan_estimate_and_measurement_are_kept_together(tmp_path: Path, accumulate: int) -> None:
    run_ranks(2, fit, str(tmp_path), accumulate)
    record = json.loads((tmp_path / "monitor.json").read_text())
    assert record["plan"]["dp_replicate"] == 2
    assert record["estimate"]["device_bytes"] > 0
    assert record["measured"]["steps"] == 4
    assert 0 < record["measured"]["step_s"] <= record["measured"]["step_p90_s"] * 3
    assert record["measured"]["allocated_bytes"] is None  # a host keeps no such statistics


def test_a_report_before_the_end_of_warm_up_is_refused() -> None:
    with pytest.raises(ValueError, match="report_after=2 larger than it"):
        ShardMonitor(warm_up=3, report_after=2)
