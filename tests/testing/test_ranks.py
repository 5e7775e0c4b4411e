"""The rank helpers: results, errors, time-outs, isolation, and a Trainer inside a body."""

import os
import random
import subprocess
import sys
import time
import unittest
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_shard.testing import RankError, ranks, run_ranks


def sum_of_ranks(offset: int = 0) -> float:
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(dist.get_rank() + offset))
    dist.all_reduce(total)
    return total.item()


@ranks(2)
def test_body_runs_inside_an_initialised_group() -> None:
    import torch.distributed as dist

    assert dist.get_world_size() == 2
    assert dist.get_backend() == "gloo"
    assert dist.get_rank() == int(os.environ["RANK"]) == int(os.environ["LOCAL_RANK"])
    assert dist.is_torchelastic_launched()


@ranks(1)
def test_one_rank_is_a_group_too() -> None:
    import torch.distributed as dist

    assert dist.get_world_size() == 1


@pytest.mark.parametrize(("offset", "expected"), [(0, 1.0), (1, 3.0)])
@ranks(2)
def test_parametrised_values_reach_every_rank(offset: int, expected: float) -> None:
    assert sum_of_ranks(offset) == expected


@ranks(2)
def test_fixtures_reach_every_rank(tmp_path: Path) -> None:
    (tmp_path / os.environ["RANK"]).touch()
    sum_of_ranks()  # a barrier
    assert sorted(file.name for file in tmp_path.iterdir()) == ["0", "1"]


class TestMethods:
    @ranks(2)
    def test_a_method_is_a_body_too(self) -> None:
        assert sum_of_ranks() == 1.0


def test_results_of_every_rank_come_back() -> None:
    assert run_ranks(2, rank_and_sum, 10) == [(0, 21.0), (1, 21.0)]
    assert run_ranks(4, rank_and_sum) == [(rank, 6.0) for rank in range(4)]


def rank_and_sum(offset: int = 0) -> tuple[int, float]:
    return int(os.environ["RANK"]), sum_of_ranks(offset)


def fail_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        left, right = 17, 4
        assert left == right
    sum_of_ranks()


def test_the_first_failing_rank_is_the_error() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed") as caught:
        run_ranks(2, fail_on, 1)
    assert caught.value.rank == 1
    assert isinstance(caught.value.error, AssertionError)
    assert "assert 17 == 4" in str(caught.value)
    assert "in fail_on" in str(caught.value)
    assert "rank.py" not in str(caught.value)
    assert run_ranks(2, sum_of_ranks) == [1.0, 1.0]


def hang_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        time.sleep(600)


def test_a_timeout_shows_every_ranks_stack() -> None:
    with pytest.raises(RankError, match=r"did not finish on 2 ranks within 3 s") as caught:
        run_ranks(2, hang_on, 1, timeout_s=3)
    message = str(caught.value)
    assert "in hang_on" in message
    assert "in _leave" in message  # rank 0 waits for rank 1
    assert run_ranks(2, sum_of_ranks) == [1.0, 1.0]


def die(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        sys.stdout.write("last words\n")
        sys.stdout.flush()
        os.kill(os.getpid(), 9)
    time.sleep(60)


def test_a_killed_rank_is_reported_with_its_output() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 was ended by signal 9.*last words"):
        run_ranks(2, die, 1)


def skip() -> None:
    pytest.skip("not here")


def test_a_skip_in_the_body_is_a_skip() -> None:
    with pytest.raises(unittest.SkipTest, match="not here"):
        run_ranks(2, skip)


def test_output_of_the_ranks_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, say_hello)
    assert "--- rank 1 ---\nhello from 1" in capsys.readouterr().out


def say_hello() -> None:
    print("hello from", os.environ["RANK"])


def leave_traces() -> tuple[object, ...]:
    import torch

    traces = (torch.get_default_dtype(), os.environ.get("TRACE"), random.random(), torch.rand(1).item())
    torch.set_default_dtype(torch.float64)
    os.environ["TRACE"] = "left"
    return traces


def test_every_job_starts_from_untouched_state(monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_ranks(2, leave_traces)
    assert run_ranks(2, leave_traces) == first
    monkeypatch.setenv("TRACE", "from the caller")
    assert run_ranks(1, leave_traces)[0][1] == "from the caller"


def test_a_body_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="Move it to the top of its module"):
        run_ranks(2, lambda: None)


def test_an_argument_that_cannot_travel_is_named() -> None:
    with pytest.raises(TypeError, match="The argument 'offset' of sum_of_ranks"):
        run_ranks(2, sum_of_ranks, offset=lambda: 0)


def return_unpicklable() -> object:
    return lambda: None


def test_a_result_that_cannot_travel_is_named() -> None:
    with pytest.raises(RankError, match="The body returned a function, which cannot be pickled"):
        run_ranks(1, return_unpicklable)


@pytest.mark.parametrize("devices", [1, 2])
def test_a_trainer_joins_the_ranks(devices: int, tmp_path: Path) -> None:
    losses = run_ranks(devices, fit_boring_model, tmp_path)
    assert len(set(losses)) == 1


def fit_boring_model(folder: Path) -> float:
    import torch.distributed as dist
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    world_size = dist.get_world_size()
    trainer = Trainer(
        strategy="ddp",
        accelerator="cpu",
        devices=world_size,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    model = BoringModel()
    trainer.fit(model)
    assert trainer.world_size == world_size
    assert trainer.global_rank == dist.get_rank()
    assert trainer.global_step == 2
    return float(model.layer.weight.sum())


SCRIPT = """
import os
from lightning_shard.testing import run_ranks

class Offset:
    value = 5

def add(offset):
    return int(os.environ["RANK"]) + offset.value

if __name__ == "__main__":
    print(run_ranks(2, add, Offset()))
"""


def start_ranks() -> None:
    run_ranks(1, skip)


def test_ranks_cannot_start_ranks() -> None:
    with pytest.raises(RankError, match="Ranks cannot start ranks"):
        run_ranks(1, start_ranks)


def test_a_script_can_run_ranks_too(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert result.stdout == "[5, 6]\n", result.stderr


HANGING_SCRIPT = """
import os, pathlib, time
from lightning_shard.testing import run_ranks

def hang(file):
    pathlib.Path(file).write_text(f"{os.getpid()} {os.getppid()}")
    time.sleep(600)

if __name__ == "__main__":
    run_ranks(1, hang, {file!r})
"""


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks at processes through /proc")
def test_nothing_outlives_a_killed_caller(tmp_path: Path) -> None:
    script, file = tmp_path / "script.py", tmp_path / "pids"
    script.write_text(HANGING_SCRIPT.replace("{file!r}", repr(str(file))))
    caller = subprocess.Popen([sys.executable, str(script)])
    wait_until(lambda: file.exists() and " " in file.read_text())
    processes = file.read_text().split()
    assert all(map(is_running, processes))
    caller.kill()
    caller.wait()
    wait_until(lambda: not any(map(is_running, processes)))


def is_running(pid: str) -> bool:
    try:
        status = Path("/proc", pid, "stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
