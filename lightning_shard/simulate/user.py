"""A user's LightningModule outside a run: a Trainer that only answers, and its optimizers."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_shard._compat import NAMESPACE, LightningModule, Trainer
from lightning_shard.simulate.build import no_weights
from lightning_shard.simulate.patches import patched
from lightning_shard.specs import TrainSpec


def prepare_user_module(module: LightningModule, train: TrainSpec) -> None:
    """Attach a Trainer that answers questions about the run, and let the module build its model on meta.

    Raises:
        ValueError: for manual optimization, whose step only the module knows.
    """
    if not module.automatic_optimization:
        raise ValueError(
            f"{type(module).__name__} uses manual optimization: its training_step runs backward and the optimizers "
            "itself, which a simulation cannot take apart. Plan without simulation."
        )
    module.trainer = _make_trainer(train)
    with torch.device("meta"), no_weights():
        module.configure_model()


def configured_optimizers(module: nn.Module) -> list[Optimizer]:
    """What ``configure_optimizers`` returns, schedulers left out."""
    assert isinstance(module, LightningModule)
    with patched(module, "parameters", module.parameters):
        return list(_optimizers_in(module.configure_optimizers()))


@contextmanager
def without_logging() -> Iterator[None]:
    """``self.log`` does nothing inside: there is no loop whose results it could join."""
    quiet = lambda self, *args, **kwargs: None  # noqa: E731
    with patched(LightningModule, "log", quiet), patched(LightningModule, "log_dict", quiet):
        yield


def _make_trainer(train: TrainSpec) -> Trainer:
    logger = logging.getLogger(f"{NAMESPACE}.utilities.rank_zero")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return Trainer(
            accelerator="cpu",
            devices=1,
            precision=train.precision,  # type: ignore[arg-type]
            accumulate_grad_batches=train.accumulate,
            max_epochs=-1,
            max_steps=1000,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    finally:
        logger.setLevel(level)


def _optimizers_in(configured: Any) -> Iterator[Optimizer]:
    """Lightning's forms: one optimizer, a dict with one, a list of either, or a pair of lists."""
    if isinstance(configured, Optimizer):
        yield configured
    elif isinstance(configured, dict):
        yield configured["optimizer"]
    elif isinstance(configured, (list, tuple)):
        pair = len(configured) == 2 and isinstance(configured[0], list)
        for each in configured[0] if pair else configured:
            yield from _optimizers_in(each)
