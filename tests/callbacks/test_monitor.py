"""ShardMonitor keeps what was promised beside what was measured, and waits for nothing between its moments."""

import csv
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.llama import TinyLlama, make_tokens
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from lightning_shard._compat import DispatchMode
from lightning_shard.callbacks import ShardMonitor
from lightning_shard.callbacks.across_ranks import straggler
from lightning_shard.callbacks.batch_size import Work
from lightning_shard.callbacks.summary import summarize as summary_of
from lightning_shard.callbacks.window import MOST_SHOWN, summarize
from lightning_shard.report.record import MOST_ROWS, RunRecord
from lightning_shard.testing import run_ranks
from lightning_shard.testing.parity import QUIET

TOKENS_PER_STEP = 8 * 12
"""Of ``make_tokens``: global batches of 8 sequences of 12 tokens."""


def fit(folder: str, strategy: str = "auto-shard", accumulate: int = 1, clip: float | None = None) -> dict[str, Any]:
    monitor = ShardMonitor(f"{folder}/monitor.json", warm_up=1, report_after=4)
    options: Any = {**QUIET, "logger": CSVLogger(folder, name="logs", version="")}
    world_size = dist.get_world_size()
    trainer = Trainer(
        **options, strategy=strategy, devices=world_size, max_steps=6, callbacks=[monitor], log_every_n_steps=2,
        accumulate_grad_batches=accumulate, gradient_clip_val=clip,
    )  # fmt: skip
    trainer.fit(TinyLlama("lora"), make_tokens(trainer.global_rank, world_size))
    return monitor.record.to_dict()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_plan_estimate_and_measurement_are_kept_together(tmp_path: Path, accumulate: int) -> None:
    run_ranks(2, fit, str(tmp_path), accumulate=accumulate)
    record = json.loads((tmp_path / "monitor.json").read_text())
    assert record["plan"]["dp_replicate"] == 2
    assert record["estimate"]["device_bytes"] > 0
    measured = record["measured"]
    assert measured["steps"] == 6
    assert 0 < measured["step_s"] <= measured["step_p99_s"]
    assert measured["tokens_per_s"] > 0
    assert measured["batch_fill"] == pytest.approx(1.0)
    assert 0 < measured["exposed_comm_share"] <= measured["comm_share"] < 1
    assert measured["allocated_bytes"] is None  # a host keeps no such statistics
    assert measured["mfu"] is None
    assert [row["rank"] for row in record["ranks"]] == [0, 1]
    assert {name for name, *_ in record["memory"]} >= {"frozen_weights", "trained_weights", "optimizer_state"}
    assert record["window"]["lanes"]["compute"]
    assert record["window"]["lanes"]["communication"]


def test_what_lies_in_memory_is_what_was_estimated(tmp_path: Path) -> None:
    record = run_ranks(2, fit, str(tmp_path))[0]
    terms = {name: (estimated, measured) for name, estimated, measured in record["memory"]}
    for name in ("frozen_weights", "trained_weights"):
        estimated, measured = terms[name]
        assert measured <= estimated < measured * 1.1  # the estimate counts whole allocations of 512 bytes
    estimated, measured = terms["optimizer_state"]
    assert measured == pytest.approx(estimated, rel=0.1)  # Adam's step counters


@pytest.mark.parametrize("clip", [None, 1e-3])
def test_every_strategy_has_the_gradient_norm_and_loss_of_one_process(tmp_path: Path, clip: float | None) -> None:
    (alone,) = run_ranks(1, fit, str(tmp_path / "alone"), clip=clip)
    for strategy in ("tuned-ddp", "fsdp2"):
        record = run_ranks(2, fit, str(tmp_path / strategy), strategy, clip=clip)[0]
        assert [row["step"] for row in record["history"]] == [row["step"] for row in alone["history"]]
        for row, expected in zip(record["history"], alone["history"], strict=True):
            assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
            assert row["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert alone["history"][0]["grad_norm"] > 1e-2  # before clipping


def test_any_logger_gets_the_figures(tmp_path: Path) -> None:
    run_ranks(2, fit, str(tmp_path))
    rows = list(csv.DictReader((tmp_path / "logs" / "metrics.csv").open()))
    wanted = ("loss", "tokens_per_s", "tokens_per_s_per_device", "data_wait_share", "grad_norm", "exposed_comm_share")
    assert {f"monitor/{name}" for name in wanted} <= rows[-1].keys()
    last = {name: float(value) for name, value in rows[-1].items() if value}
    assert last["step"] == 6
    assert last["monitor/tokens_per_s"] == pytest.approx(2 * last["monitor/tokens_per_s_per_device"])


class CountsReads(DispatchMode):
    """Counts values that leave tensors: on a device each would wait for it."""

    num_reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class MonitorsReads(Callback):
    """Runs right around another callback's hooks of a batch."""

    def __init__(self, inner: ShardMonitor) -> None:
        self.inner, self.reads = inner, CountsReads()

    def on_train_start(self, *args: Any) -> None:
        self.inner.on_train_start(*args)

    def on_train_batch_start(self, *args: Any) -> None:
        with self.reads:
            self.inner.on_train_batch_start(*args)

    def on_train_batch_end(self, *args: Any) -> None:
        with self.reads:
            self.inner.on_train_batch_end(*args)


class Masked(TinyLlama):
    def training_step(self, batch: Any, index: int) -> Any:
        return super().training_step([batch["input_ids"]], index)


def test_nothing_is_read_from_the_device_between_logs(tmp_path: Path) -> None:
    monitor = ShardMonitor(str(tmp_path / "m.json"), warm_up=1, report_after=50, profile_every=0)
    counting = MonitorsReads(monitor)
    batches = [{"input_ids": batch[0], "attention_mask": torch.ones_like(batch[0])} for batch in make_tokens(0, 1)]
    data: Any = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    trainer = Trainer(**QUIET, devices=1, max_steps=8, callbacks=[counting], log_every_n_steps=50)  # type: ignore[arg-type]
    trainer.fit(Masked("lora"), data)
    assert counting.reads.num_reads == 0
    monitor._flush(trainer, trainer.lightning_module)
    assert monitor.record.ranks[0]["tokens"] == 7 * TOKENS_PER_STEP  # without the warm-up step


def test_padding_is_no_throughput() -> None:
    work = Work()
    work.add(
        {"input_ids": torch.zeros(2, 4, dtype=torch.long), "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])}
    )
    work.add([torch.zeros(3, 4, dtype=torch.long), torch.zeros(3)])
    work.add(torch.zeros(5, 2))
    assert work.positions == 8 + 12
    assert work.take() == (10, 5 + 12)
    assert work.take() == (0, 0)


def test_exposed_communication_is_what_no_computation_hides() -> None:
    seen = summarize([(0.0, 2.0), (1.0, 4.0), (8.0, 10.0)], [(3.0, 6.0), (9.0, 9.5)])
    assert (seen.window_s, seen.comm_s, seen.exposed_s, seen.own_s) == (10.0, 3.5, 2.0, 8.0)
    assert seen.lanes == {"compute": [(0.0, 4.0), (8.0, 10.0)], "communication": [(3.0, 6.0), (9.0, 9.5)]}
    assert summarize([], []).exposed_share == 0.0


def test_what_the_host_does_before_the_first_operation_is_its_own() -> None:
    seen = summarize([(0.0, 1.0)], [(1.0, 2.0)], window_s=5.0)
    assert (seen.window_s, seen.exposed_s, seen.own_s) == (5.0, 1.0, 4.0)


def test_a_long_lane_is_drawn_with_few_intervals() -> None:
    lane = [(i * 1.0, i + 0.5) for i in range(10 * MOST_SHOWN)]
    seen = summarize(lane, [])
    assert len(seen.lanes["compute"]) <= MOST_SHOWN


class SlowRank(TinyLlama):
    def training_step(self, batch: Any, index: int) -> Any:
        if dist.get_rank() == 1:
            time.sleep(0.5)
        return super().training_step(batch, index)


def fit_slow(folder: str) -> dict[str, Any]:
    monitor = ShardMonitor(f"{folder}/monitor.json", warm_up=1, report_after=3)
    trainer = Trainer(**QUIET, strategy="tuned-ddp", devices=2, max_steps=3, callbacks=[monitor])  # type: ignore[arg-type]
    trainer.fit(SlowRank("lora"), make_tokens(dist.get_rank(), 2))
    return monitor.record.to_dict()


def test_the_straggler_is_named(tmp_path: Path) -> None:
    for record in run_ranks(2, fit_slow, str(tmp_path)):
        assert record["measured"]["straggler_rank"] == 1


def test_ranks_that_are_about_as_fast_are_no_stragglers() -> None:
    assert straggler([{"own_s": 1.0}, {"own_s": 1.05}]) is None
    assert straggler([{"own_s": 1.0}, {"own_s": 1.2}, {"own_s": 1.0}]) == 1
    assert straggler([{"own_s": None}, {"own_s": None}]) is None
    assert straggler([{"own_s": 1.0}]) is None


def test_a_resumed_run_counts_its_own_steps(tmp_path: Path) -> None:
    def trainer(steps: int, **options: Any) -> Trainer:
        return Trainer(**{**QUIET, "devices": 1, "max_steps": steps, "strategy": "auto-shard", **options})

    first = trainer(3)
    first.fit(TinyLlama("lora"), make_tokens(0, 1))
    first.save_checkpoint(tmp_path / "a.ckpt")
    monitor = ShardMonitor(str(tmp_path / "m.json"), warm_up=1, report_after=2)
    second = trainer(6, callbacks=[monitor], accumulate_grad_batches=2, max_epochs=2)
    second.fit(TinyLlama("lora"), make_tokens(0, 1), ckpt_path=tmp_path / "a.ckpt")
    record = RunRecord.load(tmp_path / "m.json")
    assert record.measured["steps"] == 3
    assert record.history[-1]["step"] == 6


class Fails(TinyLlama):
    def training_step(self, batch: Any, index: int) -> Any:
        if index == 5:
            raise KeyError("of the user")
        return super().training_step(batch, index)


def test_what_was_measured_outlives_an_error(tmp_path: Path) -> None:
    monitor = ShardMonitor(str(tmp_path / "m.json"), warm_up=1, report_after=2)
    trainer = Trainer(**QUIET, devices=1, max_steps=8, callbacks=[monitor], log_every_n_steps=2)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="of the user"):
        trainer.fit(Fails("lora"), make_tokens(0, 1))
    assert RunRecord.load(tmp_path / "m.json").history[-1]["step"] == 4


def test_a_long_history_is_thinned() -> None:
    record = RunRecord()
    for step in range(3 * MOST_ROWS):
        record.add({"step": step})
    assert len(record.history) <= MOST_ROWS
    assert record.history[0]["step"] == 0
    assert record.history[-1]["step"] == 3 * MOST_ROWS - 1


def test_a_file_of_something_else_is_told(tmp_path: Path) -> None:
    (tmp_path / "shard_monitor.json").write_text("{}")
    with pytest.raises(ValueError, match="is no file of ShardMonitor"):
        RunRecord.load(tmp_path)


def test_the_summary_says_predicted_against_measured() -> None:
    measured = {"step_s": 0.12, "tokens_per_s": 1000.0, "exposed_comm_share": 0.2, "straggler_rank": 3, "mfu": None}
    line = summary_of(measured, {"step_s": 0.1, "comm_share": 0.1})
    assert line == (
        "step 120 ms (+20% against 100 ms predicted), tokens/s 1,000, waiting for communication 20% (10% predicted), "
        "rank 3 holds the others up"
    )
    assert summary_of({}, {}) == "no step measured yet"


def test_short_batches_are_compared_with_what_they_should_take() -> None:
    """Half of the planned positions take half of the computing; collectives and update stay."""
    line = summary_of({"step_s": 0.066, "batch_fill": 0.5}, {"step_s": 0.1, "compute_s": 0.08})
    assert line == "step 66 ms (+10% against 60 ms predicted), batches 50% as full as planned for"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warm_up": 3, "report_after": 2}, "report_after=2 larger than it"),
        ({"profile_every": -1}, "profile_every=-1 is a number of steps"),
    ],
)
def test_wrong_numbers_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShardMonitor(**options)
