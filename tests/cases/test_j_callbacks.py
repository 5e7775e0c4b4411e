"""What ranks decide together: checkpoints and early stopping (J4); tuners and averages (J6, J7) are with the features."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.regression import Regression, make_vectors
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

from lightning_shard import FSDP2Strategy
from lightning_shard.testing import run_ranks
from lightning_shard.testing.parity import QUIET

STRATEGIES = ["tuned-ddp", "fsdp2", partial(FSDP2Strategy, adapters="replicated")]


class Disagrees(Regression):
    """Each rank sees its own metric: rank 0's falls, rank 1's rises."""

    def validation_step(self, batch: Any, _: int) -> None:
        sign = -1.0 if self.global_rank == 0 else 1.0
        self.log("mine", torch.tensor(sign * (1.0 + self.current_epoch)))


def stopped(strategy: Any, folder: Path) -> tuple[int, str, int]:
    world_size = dist.get_world_size()
    data = make_vectors(dist.get_rank(), world_size)
    best = ModelCheckpoint(folder, monitor="mine", save_top_k=1)
    stop = EarlyStopping("mine", patience=2)
    trainer = Trainer(
        **{**QUIET, "enable_checkpointing": True},
        strategy=strategy if isinstance(strategy, str) else strategy(),
        devices=world_size,
        max_epochs=5,
        callbacks=[best, stop],
    )
    trainer.fit(Disagrees(), data, data)
    return trainer.current_epoch, best.best_model_path, trainer.global_step


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_j4_ranks_that_disagree_on_the_best_do_not_hang(strategy: Any, tmp_path: Path) -> None:
    results = run_ranks(2, stopped, strategy, tmp_path, timeout_s=90)
    assert len({(epoch, step) for epoch, _, step in results}) == 1
    assert list(tmp_path.iterdir())
