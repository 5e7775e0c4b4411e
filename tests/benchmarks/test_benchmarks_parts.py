"""The arithmetic of the benchmarks, and that what is checked in is whole."""

import csv
from pathlib import Path

import pytest

from benchmarks.compare import losses_agree
from benchmarks.estimators import published_formula
from benchmarks.litgpt_step import jobs
from benchmarks.memory_accuracy import impossible
from benchmarks.options import NAMES, Options
from benchmarks.published import HERE, published
from benchmarks.report import README, write_tables
from benchmarks.results import read, save
from benchmarks.stats import ratio, spread
from benchmarks.turns import sent_over


def test_ratios_are_of_neighbours() -> None:
    slow_machine = [1.0, 10.0, 2.0]
    assert ratio([2.0, 20.0, 4.0], slow_machine) == {"ratio": 2.0, "ratio_q1": 2.0, "ratio_q3": 2.0}
    assert spread([1.0, 2.0, 3.0, 4.0]) == (4.0 - 2.0) / 2.5


def test_different_losses_are_an_error() -> None:
    engines = {"a": {"losses": [1.0, 0.9]}, "b": {"losses": [1.0, 0.91]}, "local": {"losses": [7.0, 7.0]}}
    with pytest.raises(RuntimeError, match="b and a do not compute the same losses on rank 0"):
        losses_agree([engines], 2e-4)
    del engines["b"]
    losses_agree([engines], 2e-4)


def test_bytes_sent_around_a_ring() -> None:
    assert sent_over({"all_gather": [2, 100], "reduce_scatter": [1, 100], "all_reduce": [1, 100]}, 4) == 300
    assert sent_over({"all_gather": [2, 100], "reduce_scatter": [1, 100], "all_reduce": [1, 100]}, 4, shards=2) == 250


def test_published_formulas_of_deepspeed() -> None:
    # DeepSpeed's documentation, ZeRO-2 and ZeRO-3 without offload: 2 + 18/n and 18/n bytes per parameter
    assert published_formula(8_000, 100, 8) == (16_000 + 18_000, 400 + 18_000)


def test_every_published_row_is_told() -> None:
    rows = published()
    assert len(rows) == 39
    assert sum(not row.left_out for row in rows) == 23
    assert all(row.arguments or row.left_out for row in rows)


def test_litgpts_rows_are_told_as_they_ran() -> None:
    """Every counted row of litgpt has a job, with the sizes, rank and precision that the published row states."""
    counted = {row.id for row in published() if not row.left_out and "litgpt" in row.source}
    told = jobs()
    assert told.keys() == counted
    with (HERE / "published.csv").open(newline="") as lines:
        rows = {row["id"]: row for row in csv.DictReader(lines)}
    for name, job in told.items():
        row = rows[name]
        assert (job.seq_len, job.micro_batch_size) == (int(row["seq_len"]), int(row["micro_batch"]))
        assert row["precision"].startswith(job.precision)
        assert (job.lora is None) == (row["method"] == "full")
        if job.lora is not None:
            assert f"r{job.lora['lora_r']} " in row["method"]
            assert f"dropout {job.lora['lora_dropout']}" in row["method"]
            assert ("all+head" in row["method"]) == job.lora.get("lora_head", False)


def test_figures_below_their_own_floor_are_refused() -> None:
    # litgpt's table has Llama-3.2-3B in full, bf16 with AdamW, at 16.51 GB: 8 bytes per parameter are 25.7 GB
    terms = {"trained_weights": 2 * 3_210_000_000, "optimizer_state": 6 * 3_210_000_000, "gradients": 10**9}
    assert "25.68 GB" in impossible(16.51e9, terms)
    assert impossible(26e9, terms) == ""


def test_a_case_replaces_its_older_rows(tmp_path: Path) -> None:
    options = Options(command="test")
    save("load", [{"case": "a", "x": 1}, {"case": "b", "x": 1}], options, str(tmp_path))
    save("load", [{"case": "a", "x": 2}, {"case": "a", "x": 3}], options, str(tmp_path))
    assert [(row["case"], row["x"]) for row in read("load", str(tmp_path))] == [("b", 1), ("a", 2), ("a", 3)]


def test_the_readme_shows_the_results_that_are_kept(tmp_path: Path) -> None:
    copy = tmp_path / "README.md"
    copy.write_text(README.read_text())
    write_tables(str(README.parent / "results"), copy)
    assert copy.read_text() == README.read_text(), "run python -m benchmarks tables"
    assert all(f"<!-- {name}:" in README.read_text() for name in NAMES)
