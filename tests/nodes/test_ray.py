"""Ray Train runs a Trainer with auto-shard on two workers, and goes on when one of them is killed."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ray.train", reason="Ray is an optional extra: pip install 'lightning-shard[ray]'")

sys.path.insert(0, str(Path(__file__).parent))

import ray
from fault_log import one_try
from helpers.regression import WIDTH, Regression
from lightning.pytorch import Callback, Trainer, seed_everything
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, TensorDataset

import lightning_shard  # noqa: F401 - registers the strategies' names
from lightning_shard.integrations import KeepGlobalBatch
from lightning_shard.integrations.ray import ReportCheckpoint, latest_checkpoint, trainer_options

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[1]
STEPS = 8


class Record(Callback):
    """Losses of rank 0 in a file, and a sudden end of rank 1 at a step of the first attempt."""

    def __init__(self, out: Path, die_at: int | None) -> None:
        self.out, self.die_at = out, die_at

    def on_train_batch_end(self, trainer: Trainer, module: object, outputs: Any, batch: object, index: int) -> None:
        loss = float(trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean"))
        if trainer.is_global_zero:
            plan = trainer.strategy.plan.to_dict()
            with (self.out / "steps.jsonl").open("a") as lines:
                lines.write(json.dumps({"step": trainer.global_step, "loss": loss, "pid": os.getpid(), **plan}) + "\n")
        marker = self.out / "died"
        if trainer.global_step == self.die_at and trainer.global_rank == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def work(config: dict[str, Any]) -> None:
    """What each worker runs."""
    torch.set_num_threads(1)
    seed_everything(0)
    inputs = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(2))
    data = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=4, shuffle=True)
    trainer = Trainer(
        strategy=config["strategy"],
        accelerator="cpu",
        **trainer_options(),
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[
            KeepGlobalBatch(8),
            Record(Path(config["out"]), config["die_at"]),
            ReportCheckpoint(every_n_train_steps=2),
        ],
    )
    with latest_checkpoint() as path:
        trainer.fit(Regression(lr=0.02), data, ckpt_path=path)


@pytest.fixture(scope="module")
def cluster() -> Any:
    paths = os.pathsep.join([str(TESTS.parent), str(TESTS), str(TESTS / "nodes")])
    ray.init(
        num_cpus=3, include_dashboard=False, log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}},
    )  # fmt: skip
    yield
    ray.shutdown()


def fit(out: Path, strategy: str, *, die_at: int | None, failures: int) -> Any:
    out.mkdir(exist_ok=True)
    sys.modules[__name__].__dict__.setdefault("__file__", __file__)
    return TorchTrainer(
        work,
        train_loop_config={"out": str(out), "strategy": strategy, "die_at": die_at},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=str(out / "ray"),
            name="run",
            failure_config=FailureConfig(max_failures=failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


def steps(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]


def test_a_killed_worker_costs_the_steps_since_the_last_report(cluster: Any, tmp_path: Path) -> None:
    with one_try("a worker killed in mid-run", launcher="Ray Train, 2 workers", strategy="auto-shard"):
        fit(tmp_path / "whole", "fsdp2", die_at=None, failures=0)
        result = fit(tmp_path / "killed", "auto-shard", die_at=5, failures=1)
        whole, killed = steps(tmp_path / "whole"), steps(tmp_path / "killed")
        assert [line["step"] for line in whole] == list(range(1, STEPS + 1))
        assert len({line["pid"] for line in killed}) == 2
        numbers = [line["step"] for line in killed]
        again = numbers[5]
        assert again in (3, 5)  # Ray may not have filed the report of step 4 yet
        assert numbers == [*range(1, 6), *range(again, STEPS + 1)]
        expected = {line["step"]: line["loss"] for line in whole}
        assert {line["step"]: line["loss"] for line in killed} == pytest.approx(expected, rel=1e-5)
        assert whole[0]["dp_replicate"] * whole[0]["dp_shard"] == 2
        assert result.metrics["step"] == STEPS
        assert result.checkpoint is not None
