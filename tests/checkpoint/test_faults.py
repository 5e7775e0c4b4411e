"""Faults at random, counted: tries and losses go to ``benchmarks/results/faults.jsonl``."""

import ctypes
import fcntl
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_folder_is_whole import contents, damage, files_of
from test_stopping import stop

from lightning_shard import FSDP2Strategy, TunedDDPStrategy
from lightning_shard.checkpoint import atomic
from lightning_shard.checkpoint.directory import Contents, open_directory, save_directory, to_bytes
from lightning_shard.checkpoint.errors import CheckpointError
from lightning_shard.checkpoint.manifest import find_damage, is_checkpoint, locate
from lightning_shard.testing import RankError, run_ranks

pytestmark = pytest.mark.slow
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "faults.jsonl"
SEED = 20261130


def record(fault: str, tries: int, losses: int) -> None:
    """Keep one line per fault."""
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    with RESULTS.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # tests of this file run in several processes at once
        file.seek(0)
        lines = [line for line in map(json.loads, file) if line["fault"] != fault]
        lines.append({"fault": fault, "tries": tries, "losses": losses})
        lines.sort(key=lambda line: str(line["fault"]))
        file.truncate(0)
        file.write("".join(json.dumps(line) + "\n" for line in lines))


def big(step: int) -> Contents:
    rank = dist.get_rank()
    tensors = {f"model/{rank}/{i}": torch.full((256, 1024), float(step)) for i in range(4)}
    return Contents(tensors=tensors, trainer=to_bytes({"step": step}), plan={})


def save_until_killed(folder: Path, victim: int, delay_s: float) -> None:
    save_directory(big(0), folder / "step=0.ckpt")
    if dist.get_rank() == 0:
        atomic.link(folder / "step=0.ckpt", folder / "last.ckpt")
    dist.barrier()
    if dist.get_rank() == victim:
        threading.Timer(delay_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    for step in range(1, 1000):
        save_directory(big(step), folder / f"step={step % 3}.ckpt")
        if dist.get_rank() == 0:
            atomic.link(folder / f"step={step % 3}.ckpt", folder / "last.ckpt")


def test_a_kill_at_any_moment_of_a_save_loses_no_checkpoint(tmp_path: Path) -> None:
    draw, losses = random.Random(SEED), 0
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        with pytest.raises(RankError):
            run_ranks(2, save_until_killed, folder, number % 2, draw.uniform(0.01, 0.6))
        visible = [path for path in folder.iterdir() if path.suffix == ".ckpt"]
        whole = is_checkpoint(locate(folder / "last.ckpt")) and not any(find_damage(path.resolve()) for path in visible)
        losses += not whole
    record("kill -9 of a rank during a save", 20, losses)
    assert losses == 0


def test_no_flipped_bit_and_no_missing_end_goes_unseen(tmp_path: Path) -> None:
    draw = random.Random(SEED)
    for harm, rounds in (("truncate", 1), ("remove", 1), ("flip", 10)):
        tries = losses = 0
        for _ in range(rounds):
            save_directory(contents(), tmp_path / "a.ckpt")
            for file in files_of(tmp_path / "a.ckpt"):
                before = file.read_bytes()
                if harm == "flip":
                    data = bytearray(before)
                    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
                    file.write_bytes(data)
                else:
                    damage(file, harm)
                tries += 1
                try:
                    open_directory(tmp_path / "a.ckpt", weights_only=None)
                    losses += 1
                except CheckpointError as error:
                    losses += file.name not in str(error)
                file.write_bytes(before)
        record(f"{harm} of a file, not noticed or not named", tries, losses)
        assert losses == 0


def fill_the_disk(folder: Path, quota_bytes: int) -> list[str]:
    """What each save said; the second one meets the quota on rank 1 only."""
    said = []
    save_directory(big(0), folder / "step=0.ckpt")
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (quota_bytes, limits[1]))
    try:
        save_directory(big(1), folder / "step=1.ckpt")
    except CheckpointError as error:
        said.append(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    save_directory(big(2), folder / "step=2.ckpt")  # the run goes on
    return said


def test_no_room_on_one_rank_is_told_on_all_and_the_run_goes_on(tmp_path: Path) -> None:
    for said in run_ranks(2, fill_the_disk, tmp_path, 100_000):
        (message,) = said
        assert "rank 1" in message
        assert "bytes free" in message
        assert "step=0.ckpt" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step=0.ckpt", "step=2.ckpt"]
    record("no room for one rank's part", 1, 0)


def test_a_full_file_system_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(mounted), b"tmpfs", 0, b"size=300k"):
        pytest.skip("mounting a small file system needs root")
    try:
        save_directory(contents(), mounted / "a.ckpt")
        large = Contents(tensors={"w": torch.zeros(1000, 1000)}, trainer=b"", plan={})
        with pytest.raises(CheckpointError, match=r"not written.*a\.ckpt"):
            save_directory(large, mounted / "b.ckpt")
        open_directory(mounted / "a.ckpt", weights_only=None)
        assert [path.name for path in mounted.iterdir()] == ["a.ckpt"]
    finally:
        libc.umount(os.fsencode(mounted))
    record("full file system", 1, 0)


JOB = """
    import os, signal, sys, time
    from datetime import timedelta
    sys.path.insert(0, {tests!r})
    from helpers.regression import Regression, make_vectors
    from lightning.pytorch import Callback, Trainer
    from lightning_shard import FSDP2Strategy, TunedDDPStrategy

    class Fault(Callback):
        def on_train_batch_end(self, trainer, *_):
            time.sleep(0.01)
            if trainer.global_step == 40 and trainer.global_rank == {victim}:
                {fault}

    strategy = {strategy}(timeout=timedelta(seconds={timeout_s}))
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, max_steps=100000, callbacks=[Fault()], max_epochs=100000,
                      use_distributed_sampler=False)
    trainer.fit(Regression(lr=1e-4), make_vectors(0, 2))
"""
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"


ENDS = {
    "exception": ("raise ValueError('bad batch')", "TunedDDPStrategy", 1, r"ank 1 failed first: ValueError: bad batch"),
    "silence": (STOP, "FSDP2Strategy", 1, r"Rank 1 has not answered for \d+ s; it was at batch \d+"),
    # It keeps the store that tells of the others.
    "silence-of-the-first": (STOP, "TunedDDPStrategy", 0, r"Rank 0 has not answered for \d+ s"),
}
"""Fault, strategy, whose it is, and what the others say."""


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[subprocess.Popen[bytes], Path]]]:
    """All at once, each with its output: they mostly wait."""
    started = {}
    for name, (fault, strategy, victim, _) in ENDS.items():
        folder = tmp_path_factory.mktemp(name)
        script, output = folder / "job.py", folder / "output"
        # A busy machine must not make a rank silent that is not; time passes without work here.
        job = {"fault": fault, "strategy": strategy, "victim": victim, "timeout_s": 60}
        script.write_text(textwrap.dedent(JOB).format(tests=str(Path(__file__).parents[1]), **job))
        with output.open("w") as stream:
            process = subprocess.Popen(
                [sys.executable, str(script)], stdout=stream, stderr=stream, start_new_session=True,
                env=dict(os.environ, OMP_NUM_THREADS="1"),
            )  # fmt: skip
        started[name] = process, output
    yield started
    for process, _ in started.values():
        end_session(process.pid)


@pytest.mark.parametrize("name", ENDS)
def test_who_failed_is_named_and_the_others_end(
    name: str, jobs: dict[str, tuple[subprocess.Popen[bytes], Path]]
) -> None:
    fault, _, victim, told = ENDS[name]
    process, output = jobs[name]
    other = 1 - victim
    until = time.monotonic() + 300
    while time.monotonic() < until and not re.search(rf"\[rank{other}\].*Error", output.read_text()):
        time.sleep(0.5)
        if victim == 1 and process.poll() is not None:
            break
    end_session(process.pid)
    assert re.search(told, output.read_text()), output.read_text()[-3000:]
    record(
        f"a rank that ends in {'silence' if fault == STOP else 'an exception'}, not named", 2 if fault == STOP else 1, 0
    )


def test_a_signal_to_one_rank_stops_all_at_one_step_with_one_checkpoint(tmp_path: Path) -> None:
    """J8, counted: exit code 143 or 130 on both ranks, and the run goes on from what was saved."""
    tries = [
        (strategy, number, rank)
        for strategy in (TunedDDPStrategy, FSDP2Strategy)
        for number in (signal.SIGTERM, signal.SIGINT)
        for rank in (0, 1)
    ]
    losses = 0
    for index, (strategy, number, rank) in enumerate(tries):
        (tmp_path / str(index)).mkdir()
        first, second = run_ranks(2, stop, strategy, tmp_path / str(index), number, rank)
        together = first == second and first[0] == 128 + number and len(first[2]) == 2
        losses += not (together and is_checkpoint(tmp_path / str(index) / "last-stopped.ckpt"))
    record("a signal to one rank, not stopped together", len(tries), losses)
    assert losses == 0


def end_session(leader: int) -> None:
    """A stopped rank is still there."""
    for _ in range(2):
        try:
            os.killpg(leader, signal.SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(0.1)
