"""Ray Train: a TorchTrainer whose workers run a Lightning Trainer with ``"auto-shard"``. Needs the ``ray`` extra.

Inside the function that TorchTrainer runs on its workers::

    trainer = Trainer(strategy="auto-shard", accelerator="auto", **trainer_options(), callbacks=[ReportCheckpoint()])
    with latest_checkpoint() as path:
        trainer.fit(module, data, ckpt_path=path)

Ray starts the workers and their process group, Lightning's samplers divide the data as ever, and a run that
``FailureConfig(max_failures=...)`` starts again goes on from the last checkpoint it reported.
"""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray.train
from ray.train import Checkpoint
from ray.train.lightning import RayLightningEnvironment
from typing_extensions import override

from lightning_shard._compat import Callback, LightningModule, Trainer
from lightning_shard.integrations.launched import launched

CHECKPOINT_NAME = "checkpoint.ckpt"
"""Name of Lightning's checkpoint inside Ray's."""


def trainer_options() -> dict[str, Any]:
    """What Trainer must know of Ray's workers: nodes, devices, and the environment that names the ranks.

    Raises:
        ValueError: when Ray has put different numbers of workers on the nodes. Give the ScalingConfig a
            ``placement_strategy`` or ``resources_per_worker`` with which every node holds as many.
    """
    return {**launched(), "plugins": [RayLightningEnvironment()]}


@contextmanager
def latest_checkpoint() -> Iterator[str | None]:
    """Path of the last checkpoint that an earlier attempt reported, for ``fit(ckpt_path=...)``; None at the first."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        yield None
        return
    with checkpoint.as_directory() as folder:
        yield str(Path(folder, CHECKPOINT_NAME))


class ReportCheckpoint(Callback):
    """Save a checkpoint and report it to Ray with the logged metrics, at the end of every epoch and on the way.

    All ranks save together, as they must under sharded plans; rank 0's report carries the checkpoint.

    Args:
        every_n_train_steps: report after as many optimizer steps too; None reports at the end of epochs alone.
        shared_dir: where to save before Ray takes the checkpoint to its storage. Checkpoints that all ranks write
            into need a folder that all nodes see; by default it is a temporary one of rank 0's node.
    """

    def __init__(self, *, every_n_train_steps: int | None = None, shared_dir: str | Path | None = None) -> None:
        if every_n_train_steps is not None and every_n_train_steps < 1:
            raise ValueError(f"every_n_train_steps={every_n_train_steps} must be 1 or more, or None.")
        self._every_n_steps = every_n_train_steps
        self._shared_dir = shared_dir
        self._reported_at = 0

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if self._every_n_steps and step != self._reported_at and step % self._every_n_steps == 0:
            self._report(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        self._reported_at = trainer.global_step
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        mine = tempfile.mkdtemp(prefix="report-", dir=self._shared_dir) if trainer.is_global_zero else None
        folder = trainer.strategy.broadcast(mine)
        assert folder is not None
        trainer.save_checkpoint(Path(folder, CHECKPOINT_NAME))
        ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder) if trainer.is_global_zero else None)
        if trainer.is_global_zero:
            shutil.rmtree(folder)  # Ray has taken a copy to its storage
