"""torchrun over two nodes: the world, the plan, and runs that lose a process or a node and go on."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fault_log import one_try
from namespaces import HERE, Pair, torchrun, two_nodes, why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]

JOB = str(HERE / "job.py")
STEPS = 16
ELASTIC = ("--nnodes", "1:2", "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=3,join_timeout=60")
WAIT_S = 400.0
"""Patience with a busy machine; what is tested ends by itself long before."""


@pytest.fixture
def pair() -> Iterator[Pair]:
    with two_nodes() as made:
        yield made


def start(pair: Pair, out: Path, *options: str, launch: tuple[str, ...] = ("--nnodes", "2")) -> list[Any]:
    out.mkdir(exist_ok=True)
    script = [JOB, "--out", str(out), "--steps", str(STEPS), *options]
    return [
        node.start(torchrun(pair, node, script, *launch), out / f"{node.host}.log") for node in (pair.a, pair.b)
    ]  # fmt: skip


def steps(out: Path) -> list[dict[str, Any]]:
    file = out / "steps.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for_step(out: Path, number: int) -> dict[str, Any]:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        for line in steps(out):
            if line["step"] >= number:
                return line
        time.sleep(0.1)
    raise AssertionError(f"step {number} never came: {output(out)}")


def output(out: Path) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text()[-6000:]}" for log in sorted(out.glob("*.log")))


def finish(processes: "list[subprocess.Popen[str]]", out: Path) -> None:
    for process in processes:
        assert process.wait(timeout=WAIT_S) == 0, output(out)


def losses(out: Path) -> dict[int, float]:
    """The last loss reported for each step."""
    return {line["step"]: line["loss"] for line in steps(out)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of the run that nothing interrupts, on one process."""
    out = tmp_path_factory.mktemp("whole")
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1",
         JOB, "--out", str(out), "--steps", str(STEPS), "--strategy", "ddp"],
        check=True, timeout=WAIT_S, cwd=HERE.parents[1], capture_output=True,
    )  # fmt: skip
    return losses(out)


def require_same_curve(out: Path, whole: dict[int, float]) -> None:
    assert losses(out) == pytest.approx(whole, rel=1e-4), output(out)


@pytest.mark.parametrize("strategy", ["auto-shard", "hsdp"])
def test_two_nodes_of_two_ranks_train_as_one_process(
    strategy: str, pair: Pair, whole: dict[int, float], tmp_path: Path
) -> None:
    finish(start(pair, tmp_path, "--strategy", strategy), tmp_path)
    require_same_curve(tmp_path, whole)
    plan = steps(tmp_path)[0]["plan"]
    assert plan["dp_replicate"] * plan["dp_shard"] * plan["tp"] == 4


@pytest.mark.parametrize("strategy", ["auto-shard", "fsdp2"])
def test_a_lost_process_costs_the_steps_since_the_last_checkpoint(
    strategy: str, pair: Pair, whole: dict[int, float], tmp_path: Path
) -> None:
    with one_try("a rank killed in mid-run", launcher="torchrun, 2 nodes x 2 ranks", strategy=strategy) as line:
        agents = start(pair, tmp_path, "--strategy", strategy, "--pause-s", "0.3", launch=ELASTIC)
        victim = wait_for_step(tmp_path, 5)["pid"]
        subprocess.run(["kill", "-9", str(victim)], check=True)
        finish(agents, tmp_path)
        assert len({line["pid"] for line in steps(tmp_path)}) == 2
        assert {line["world"] for line in steps(tmp_path)} == {4}
        require_same_curve(tmp_path, whole)
        line["steps_repeated"] = len(steps(tmp_path)) - STEPS


@pytest.mark.parametrize("strategy", ["auto-shard", "fsdp2"])
def test_a_lost_node_leaves_a_smaller_world_that_goes_on(
    strategy: str, pair: Pair, whole: dict[int, float], tmp_path: Path
) -> None:
    with one_try("a node lost in mid-run", launcher="torchrun, 2 nodes x 2 ranks", strategy=strategy) as line:
        first, _ = start(pair, tmp_path, "--strategy", strategy, "--pause-s", "0.3", launch=ELASTIC)
        wait_for_step(tmp_path, 5)
        pair.b.pull_the_plug()
        finish([first], tmp_path)
        assert {line["world"] for line in steps(tmp_path)} == {4, 2}
        require_same_curve(tmp_path, whole)
        line["steps_repeated"] = len(steps(tmp_path)) - STEPS


def test_a_cut_cable_is_noticed_when_a_collective_times_out(
    pair: Pair, whole: dict[int, float], tmp_path: Path
) -> None:
    with one_try("the cable cut in mid-run", launcher="torchrun, 2 nodes x 2 ranks", strategy="fsdp2") as line:
        waits = ("--pause-s", "0.3", "--timeout-s", "8")
        first, _ = start(pair, tmp_path, "--strategy", "fsdp2", *waits, launch=ELASTIC)
        wait_for_step(tmp_path, 5)
        pair.cut()
        finish([first], tmp_path)
        assert {line["world"] for line in steps(tmp_path)} == {4, 2}
        require_same_curve(tmp_path, whole)
        line["steps_repeated"] = len(steps(tmp_path)) - STEPS
