"""The machine part of the doctor: limits, disk, and ranks that answer or do not."""

import json
import resource
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_shard.cli import main
from lightning_shard.doctor import machine
from lightning_shard.doctor.machine import check_disk, check_files, check_shared_memory
from lightning_shard.doctor.ping import check_ping
from lightning_shard.testing import run_ranks

Usage = namedtuple("Usage", "total used free")


def test_a_low_limit_on_open_files_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    (finding,) = check_files(num_workers=4)
    assert "may open 256 files" in finding.what
    assert "ulimit -n" in finding.fix
    assert list(check_files(num_workers=0)) == []


def test_little_shared_memory_is_told_where_workers_use_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: Usage(64, 0, 64 * 2**20))
    (finding,) = check_shared_memory(2, tmp_path)
    assert "64.00 MiB left" in finding.what
    assert "--shm-size" in finding.fix
    assert list(check_shared_memory(0, tmp_path)) == []


@pytest.mark.parametrize(("least", "wanted", "level"), [(100, 100, None), (100, 300, "warning"), (300, 0, "error")])
def test_disk_space_is_compared_with_checkpoints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, least: int, wanted: int, level: str | None
) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: Usage(1000, 800, 200))
    findings = list(check_disk(tmp_path / "not" / "yet", least, wanted))
    assert [finding.level for finding in findings] == ([] if level is None else [level])


def ping(slow_rank: int | None) -> tuple[list[str], float]:
    if dist.get_rank() == slow_rank:
        time.sleep(4)
        return [], 0.0
    start = time.monotonic()
    return [finding.what for finding in check_ping(torch.device("cpu"), 2.0)], time.monotonic() - start


def test_ranks_that_are_there_answer() -> None:
    assert [found for found, _ in run_ranks(3, ping, None)] == [[], [], []]


def test_a_rank_that_does_not_answer_is_named_in_time() -> None:
    for found, waited_s in run_ranks(3, ping, 1)[::2]:
        assert found == ["Of 3 ranks rank 1 did not sign in within 2 s."]
        assert waited_s >= 2.0


def test_the_command_starts_its_own_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--folder", str(tmp_path)]) == 0
    answer = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert answer["ready"]
    assert all(finding["level"] == "warning" for finding in answer["findings"])


def test_a_folder_that_cannot_be_written_is_an_honest_no(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(machine.os, "access", lambda *_: False)
    assert main(["doctor", "--devices", "1"]) == 1
    assert "cannot be written to" in capsys.readouterr().out


def test_wrong_times_are_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--ping-timeout", "0"]) == 2
    assert "--ping-timeout 0 is a number of seconds above 0" in capsys.readouterr().err
