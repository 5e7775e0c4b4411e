"""A signal on one rank: one checkpoint, at one step, on all (J8)."""

import os
import signal
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.regression import Regression, make_vectors
from helpers.resuming import Losses
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment

from lightning_shard import FSDP2Strategy, Plan, TunedDDPStrategy
from lightning_shard.checkpoint.manifest import is_checkpoint
from lightning_shard.testing import count_collectives, run_ranks
from lightning_shard.testing.parity import QUIET


class Signal(Callback):
    """Sends this process a signal after a step, on one rank."""

    def __init__(self, number: int, *, rank: int = 0, step: int = 7) -> None:
        self.number, self.rank, self.step = number, rank, step

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        time.sleep(0.002)
        if trainer.global_step == self.step and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.number)


def stop(make_strategy: Any, folder: Path, number: int, rank: int) -> tuple[Any, int, list[float]]:
    """Exit code, step of the stop, and losses of two steps after going on."""
    world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    options = {**QUIET, "enable_checkpointing": True, "devices": world[1]}
    trainer = Trainer(
        **options,
        strategy=make_strategy(),
        callbacks=[Signal(number, rank=rank), ModelCheckpoint(folder)],
        max_epochs=9999,
    )
    with pytest.raises(SystemExit) as left:
        trainer.fit(Regression(lr=1e-3), make_vectors(*world))
    step, losses = trainer.global_step, Losses()
    again = Trainer(
        **options,
        strategy=make_strategy(),
        callbacks=[losses, ModelCheckpoint(folder)],
        max_steps=step + 2,
        max_epochs=9999,
    )
    again.fit(Regression(lr=1e-3), make_vectors(*world), ckpt_path="last")
    assert again.global_step == step + 2
    return left.value.code, step, losses.losses


@pytest.mark.parametrize(
    ("make", "number", "rank"),
    [(FSDP2Strategy, signal.SIGTERM, 1)],  # the others are counted among the faults
    ids=["fsdp2-term-1"],
)
def test_all_ranks_stop_at_one_step_with_one_checkpoint(make: Any, number: int, rank: int, tmp_path: Path) -> None:
    """J8: a signal to one rank only; exit code 143 or 130, and the file loads."""
    first, second = run_ranks(2, stop, make, tmp_path, number, rank)
    assert first == second
    assert first[0] == 128 + number
    assert len(first[2]) == 2
    assert is_checkpoint(tmp_path / "last-stopped.ckpt")


def test_one_process_stops_after_the_batch(tmp_path: Path) -> None:
    code, step, _ = stop(partial(TunedDDPStrategy), tmp_path, signal.SIGTERM, 0)
    assert (code, step) == (143, 7)


def collectives_per_batch() -> list[int]:
    class Counting(Callback):
        def __init__(self) -> None:
            self.counts: list[int] = []

        def on_train_batch_end(self, *_: Any) -> None:
            self.counts.append(len(sent.calls))

    counting = Counting()
    strategy = TunedDDPStrategy(doctor=False)
    trainer = Trainer(**QUIET, strategy=strategy, devices=2, max_steps=8, callbacks=[counting])
    with count_collectives() as sent:
        trainer.fit(Regression(), make_vectors(dist.get_rank(), 2, num_samples=80))
    between = [after - before for before, after in zip(counting.counts, counting.counts[1:], strict=False)]
    return between[1:-1]  # the first and the last step of a run have more to do


def test_watching_for_signals_sends_nothing_per_batch() -> None:
    for counts in run_ranks(2, collectives_per_batch):
        assert counts == [1] * 5  # the gradients' reduction, and no flag


def test_slurm_requeues_once_and_the_run_goes_on_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/requeued\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    for name, value in {
        "JOB_ID": "42", "NTASKS": "1", "LOCALID": "0", "PROCID": "0", "NODEID": "0", "NODELIST": "here", "JOB_NAME": "job",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"SLURM_{name}", value)

    def trainer(*callbacks: Callback, steps: int) -> Trainer:
        return Trainer(
            **QUIET, strategy=TunedDDPStrategy(), devices=1, max_steps=steps, callbacks=list(callbacks),
            plugins=[SLURMEnvironment()], default_root_dir=tmp_path, max_epochs=99,
        )  # fmt: skip

    trainer(Signal(signal.SIGUSR1, step=3), Signal(signal.SIGUSR1, step=5), steps=8).fit(
        Regression(), make_vectors(0, 1)
    )
    assert (tmp_path / "requeued").read_text() == "requeue 42\n"
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["hpc_ckpt_1.ckpt"]
    losses = Losses()
    trainer(losses, steps=8).fit(Regression(), make_vectors(0, 1))
    assert len(losses.losses) == 5  # from step 3 on


def timeouts_of_all_groups() -> list[float]:
    """Of every process group that a run and its save make."""
    from lightning_shard._compat.groups import collective_timeout

    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=77), None)
    assert collective_timeout() == timedelta(seconds=77)
    before = set(dist.distributed_c10d._world.pg_map)
    plans = [Plan(dp_replicate=2, dp_shard=2), Plan(dp_shard=4, adapters="replicated")]
    for plan in plans:
        trainer = Trainer(**QUIET, strategy=FSDP2Strategy(plan), devices=4, max_steps=1)
        trainer.fit(Regression(), make_vectors(dist.get_rank(), 4))
        trainer.strategy._writers()
    made = set(dist.distributed_c10d._world.pg_map) - before
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in made]


@pytest.mark.slow
def test_every_group_has_the_strategys_timeout() -> None:
    for timeouts in run_ranks(4, timeouts_of_all_groups):
        assert len(timeouts) >= 6  # two axes, and for each plan the host's, the writers' and the replicas' own
        assert set(timeouts) == {77.0}
