"""``lightning-shard report``: a page and its pictures, from a run's record alone."""

import html.parser
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.regression import Regression, make_vectors
from lightning.pytorch import Trainer

from lightning_shard.callbacks import ShardMonitor
from lightning_shard.cli import main
from lightning_shard.report import write_report
from lightning_shard.report.advice import advice
from lightning_shard.report.record import RunRecord
from lightning_shard.testing.parity import QUIET

pytest.importorskip("matplotlib")

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "firefox")
PNG = b"\x89PNG\r\n"


def make_record(**changes: Any) -> RunRecord:
    """A run on four ranks, as the monitor would have written it."""
    measured = {"steps": 60, "step_s": 0.25, "step_p90_s": 0.26, "step_p99_s": 0.3, "tokens_per_s": 65_000.0}
    shares = {"mfu": 0.31, "data_wait_share": 0.01, "comm_share": 0.24, "exposed_comm_share": 0.06}
    fields: dict[str, Any] = {
        "run": {"strategy": "AutoShardStrategy", "world_size": 4, "device": "NVIDIA <H200>", "precision": "bf16-true"},
        "plan": {"dp_shard": 4},
        "estimate": {"step_s": 0.24, "tokens_per_s": 68_000.0, "comm_share": 0.05, "mfu": 0.33, "terms": {}},
        "measured": {**measured, **shares, "allocated_bytes": 30 * 2**30, "reserved_bytes": None, "straggler_rank": None},
        "memory": [["frozen_weights", 15 * 2**30, 15 * 2**30], ["in flight at the peak", 14 * 2**30, 15 * 2**30]],
        "ranks": [
            {"rank": i, "run_step_p50_s": 0.25, "own_s": 0.2, "wait_s": 0.0, "comm_share": 0.2, "exposed_comm_share": None}
            for i in range(4)
        ],
        "history": [{"step": i, "loss": 4 / (1 + i / 10), "tokens_per_s": 64_000 + 50 * i} for i in range(5, 61, 5)],
        "validation": [{"step": 30, "val_loss": 1.2}, {"step": 60, "val_loss": 0.7}],
        "window": {
            "step": 50, "window_s": 0.25, "comm_s": 0.06, "exposed_s": 0.015,
            "lanes": {"compute": [(0.0, 0.1), (0.11, 0.24)], "communication": [(0.05, 0.1), (0.24, 0.25)]},
        },
    }  # fmt: skip
    return RunRecord(**{**fields, **changes})


class Reader(html.parser.HTMLParser):
    """What a page loads, and the text it shows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]
        assert tag not in ("script", "link", "iframe")

    def handle_data(self, data: str) -> None:
        self.text += data


def write(folder: Path, **changes: Any) -> Reader:
    make_record(**changes).write(folder / "shard_monitor.json")
    return Reader(write_report(folder).read_text())


def test_the_page_holds_everything_it_shows(tmp_path: Path) -> None:
    page = write(tmp_path)
    assert len(page.loads) == 4
    assert all(source.startswith("data:image/png;base64,") for source in page.loads)
    for shown in ("NVIDIA <H200>", "65,000", "68,000", "31.0%", "250.0 ms", "15.00 GiB", "frozen weights"):
        assert shown in page.text
    pictures = sorted((tmp_path / "report").glob("*.png"))
    assert [picture.stem for picture in pictures] == ["communication", "loss", "memory", "throughput"]
    assert all(picture.read_bytes().startswith(PNG) for picture in pictures)


def test_a_run_that_measured_little_has_a_page_too(tmp_path: Path) -> None:
    empty = {"measured": {"steps": 1}, "estimate": None, "plan": None, "memory": [], "ranks": [], "validation": []}
    page = write(tmp_path, **empty, window=None, history=[])
    assert page.loads == []
    assert "1 optimizer steps" in page.text


def test_a_real_run_is_drawn(tmp_path: Path) -> None:
    monitor = ShardMonitor(warm_up=1, report_after=3)
    options: Any = {**QUIET, "devices": 1, "max_epochs": 2, "log_every_n_steps": 2, "default_root_dir": tmp_path}
    trainer = Trainer(**options, callbacks=[monitor])
    trainer.fit(Regression(lr=0.01), make_vectors(0, 1), make_vectors(0, 1))
    assert main(["report", str(tmp_path)]) == 0
    page = Reader((tmp_path / "report" / "index.html").read_text())
    assert "8 optimizer steps on 1 x cpu" in page.text
    record = RunRecord.load(tmp_path)
    assert [row["step"] for row in record.validation] == [4, 8]
    assert record.validation[0]["val_loss"] > record.validation[1]["val_loss"]
    assert len(page.loads) >= 3


def test_the_command_loads_no_torch(tmp_path: Path) -> None:
    make_record().write(tmp_path / "shard_monitor.json")
    code = (
        "import sys; from lightning_shard.cli import main; "
        f"code = main(['report', {str(tmp_path)!r}, '--json']); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    answer = json.loads(result.stdout)
    assert Path(answer["page"]).is_file()
    assert answer["measured"]["steps"] == 60


def test_a_folder_without_a_record_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "Give the folder of a run that had" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        ({"data_wait_share": 0.3}, "waits for data 30%"),
        ({"exposed_comm_share": 0.4}, "40% of a step is communication that nothing hides"),
        ({"straggler_rank": 2}, "Rank 2 needs longer"),
        ({"step_s": 0.5}, "2.08 times the predicted time"),
        ({"step_p90_s": 0.5}, "Steps are uneven"),
    ],
)
def test_advice_names_what_stands_out(changes: dict[str, Any], said: str | None) -> None:
    record = make_record()
    record.measured |= changes
    lines = advice(record)
    assert lines == [] if said is None else said in lines[0]


def test_a_browser_shows_it_without_a_network(tmp_path: Path) -> None:
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        pytest.skip(f"none of {', '.join(BROWSERS)} is on this machine")
    write(tmp_path)
    shot = tmp_path / "page.png"
    page = (tmp_path / "report" / "index.html").as_uri()
    options = ["--headless", f"--screenshot={shot}", "--window-size=1000,2600"]
    if "firefox" not in Path(browser).name:  # no network, and usable as root in a container
        options += [
            "--no-sandbox",
            "--disable-gpu",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={tmp_path / 'profile'}",
        ]
        dumped = subprocess.run(
            [browser, *options[3:], "--headless", "--dump-dom", page], capture_output=True, text=True, timeout=300
        )
        assert "Predicted and measured" in dumped.stdout
    subprocess.run([browser, *options, page], capture_output=True, timeout=300, check=True)
    assert shot.read_bytes().startswith(PNG)
    assert len(set(_rows(shot))) > 20  # text and pictures, no blank page


def _rows(shot: Path) -> list[bytes]:
    from matplotlib.image import imread

    return [row.tobytes() for row in imread(shot)[::10]]
