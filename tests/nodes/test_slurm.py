"""SLURM: Lightning's environment is honoured, and a preempted job saves, is queued again and goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import slurm
from fault_log import one_try
from helpers.ports import free_port

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STEPS = 12
WAIT_S = 400.0
"""Patience with a busy machine; what is tested ends by itself long before."""


def script(out: Path, *options: str) -> list[str]:
    return [str(HERE / "job.py"), "--out", str(out), "--steps", str(STEPS), "--every", "100", *options]


def steps(out: Path) -> list[dict[str, Any]]:
    file = out / "steps.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for_step(out: Path, number: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while not any(line["step"] >= number for line in steps(out)):
        assert time.monotonic() < deadline, [file.read_text()[-3000:] for file in out.glob("*.out")]
        time.sleep(0.1)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of the run that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
    subprocess.run([*launch, *script(out)], check=True, timeout=WAIT_S, cwd=ROOT, capture_output=True, env=clean())
    return {line["step"]: line["loss"] for line in steps(out)}


def clean(**more: str) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", **more}


class Emulated:
    """Two tasks as srun would start them, and a scontrol that notes what it is asked."""

    def __init__(self, out: Path) -> None:
        self.out, self.asked = out, out / "asked.txt"
        tools = out / "bin"
        tools.mkdir()
        scontrol = tools / "scontrol"
        scontrol.write_text(f'#!/bin/sh\necho "$@" >> {self.asked}\n')
        scontrol.chmod(0o755)
        self.path = f"{tools}{os.pathsep}{os.environ['PATH']}"

    def start(self, *options: str) -> list[Any]:
        shared = {
            "PATH": self.path, "SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NNODES": "1",
            "SLURM_NTASKS_PER_NODE": "2", "SLURM_NODEID": "0", "SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": str(free_port()),
        }  # fmt: skip
        tasks = []
        for rank in "01":
            output = (self.out / f"{rank}-{time.monotonic_ns()}.out").open("w")
            environment = clean(**shared, SLURM_PROCID=rank, SLURM_LOCALID=rank)
            command = [sys.executable, *script(self.out, "--save-on-preemption", "--pause-s", "0.2", *options)]
            tasks.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT))
        return tasks


@pytest.mark.parametrize("strategy", ["auto-shard", "fsdp2"])
def test_a_signal_to_one_task_saves_on_all_and_queues_the_job_again(
    strategy: str, whole: dict[int, float], tmp_path: Path
) -> None:
    with one_try("a job preempted in mid-run", launcher="SLURM, emulated, 2 tasks", strategy=strategy):
        job = Emulated(tmp_path)
        tasks = job.start("--strategy", strategy)
        wait_for_step(tmp_path, 4)
        tasks[1].send_signal(signal.SIGUSR1)
        output = "".join(file.read_text() for file in tmp_path.glob("*.out"))
        assert [task.wait(timeout=WAIT_S) for task in tasks] == [0, 0], output
        assert job.asked.read_text() == "requeue 4711\n"
        stopped = steps(tmp_path)[-1]["step"]
        assert stopped < STEPS
        assert [task.wait(timeout=WAIT_S) for task in job.start("--strategy", strategy)] == [0, 0]
        assert [line["step"] for line in steps(tmp_path)] == list(range(1, STEPS + 1))
        assert {line["step"]: line["loss"] for line in steps(tmp_path)} == pytest.approx(whole, rel=1e-4)


def start_again(job: str, environment: dict[str, str]) -> None:
    """SLURM lets a requeued job rest for two minutes: spare the test that."""
    deadline = time.monotonic() + WAIT_S
    scontrol = str(slurm.program("scontrol"))
    while time.monotonic() < deadline:
        shown = subprocess.run(
            [scontrol, "show", "job", job], env=environment, capture_output=True, text=True, check=True
        )
        if "Restarts=1" in shown.stdout and "JobState=PENDING" in shown.stdout:
            subprocess.run([scontrol, "update", f"JobId={job}", "StartTime=now"], env=environment, check=True)
            return
        time.sleep(0.5)
    raise AssertionError("the job was not queued again")


@pytest.mark.skipif(slurm.why_not() is not None, reason=slurm.why_not() or "")
def test_a_real_job_is_preempted_and_goes_on(whole: dict[int, float], tmp_path: Path) -> None:
    with one_try("a job preempted in mid-run", launcher="SLURM 22.05, 1 node x 2 tasks", strategy="fsdp2"):
        out = tmp_path / "job"
        out.mkdir()
        batch = tmp_path / "train.sbatch"
        recipe = (ROOT / "recipes/slurm/train.sbatch").read_text()
        batch.write_text(
            recipe.replace("srun --kill-on-bad-exit=1 python", f"srun --kill-on-bad-exit=1 {sys.executable}")
        )
        with slurm.one_node(tmp_path / "slurm") as environment:
            options = [
                "--nodes=1",
                "--ntasks-per-node=2",
                "--gpus-per-node=0",
                "--cpus-per-task=1",
                f"--output={out}/job.out",
            ]
            arguments = script(out, "--save-on-preemption", "--pause-s", "0.3", "--strategy", "fsdp2")
            submitted = subprocess.run(
                [str(slurm.program("sbatch")), "--parsable", *options, str(batch), *arguments],
                env={**clean(), **environment}, cwd=ROOT, capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert submitted.returncode == 0, submitted.stderr
            job = submitted.stdout.strip()
            wait_for_step(out, 4)
            subprocess.run([str(slurm.program("scancel")), "--signal=USR1", job], env=environment, check=True)
            start_again(job, environment)
            wait_for_step(out, STEPS)
            shown = subprocess.run(
                [str(slurm.program("scontrol")), "show", "job", job], env=environment, capture_output=True, text=True, check=True
            ).stdout  # fmt: skip
        assert "Restarts=1" in shown
        numbers = [line["step"] for line in steps(out)]
        assert numbers == list(range(1, STEPS + 1)), (out / "job.out").read_text()[-3000:]
        assert {line["step"]: line["loss"] for line in steps(out)} == pytest.approx(whole, rel=1e-4)
