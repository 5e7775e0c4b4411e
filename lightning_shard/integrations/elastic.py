"""A run that goes on with another number of ranks: same global batch, same order of samples."""

import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler
from typing_extensions import override

from lightning_shard._compat import Callback, LightningModule, Trainer, restart_loading, train_loaders
from lightning_shard._compat.trainer import num_data_ranks

log = logging.getLogger(__name__)

_PROGRESS = "epoch_loop.batch_progress"


class KeepGlobalBatch(Callback):
    """Every optimizer step sees the same samples, however many ranks there are, also after a restart.

    Sets ``accumulate_grad_batches`` so that micro-batch x accumulation x ranks is ``global_batch_size``, gives all
    ranks one seeded order of samples, and has a run that goes on in the middle of an epoch start at the first sample
    that no step has seen. Losses of a resumed run are then those of an uninterrupted one but for the order of
    floating-point sums. The last step of an epoch is an exception where the data set is no multiple of the global
    batch: ranks then pad by repeating samples. Choose one, or ``drop_last``.

    Args:
        global_batch_size: samples per optimizer step over all ranks.

    Raises:
        ValueError: when micro-batch x ranks does not divide ``global_batch_size``, when
            ``Trainer(accumulate_grad_batches=...)`` says otherwise, or when the order of samples is not that of a
            DataLoader with a ``batch_size``.
    """

    keeps_position = True
    """The strategy leaves the place in the data to this callback."""

    def __init__(self, global_batch_size: int) -> None:
        if global_batch_size < 1:
            raise ValueError(f"global_batch_size={global_batch_size} must be 1 or more.")
        self.global_batch_size = global_batch_size
        self._micro_batches = 0
        """Micro-batches of this epoch that this rank has trained on."""
        self._skip = 0
        """Samples of this epoch that earlier runs have trained on."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if trainer.accumulate_grad_batches != 1:
            raise ValueError(
                f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}) and KeepGlobalBatch("
                f"{self.global_batch_size}) both say how many micro-batches a step has. Leave out the former."
            )
        loader = _only_loader(train_loaders(trainer))
        self._micro_batch_size = _micro_batch_size(loader)
        self._accumulate(trainer, trainer.world_size)  # the planner reads it; corrected once the plan is known

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._accumulate(trainer, num_data_ranks(trainer))

    def _accumulate(self, trainer: Trainer, replicas: int) -> None:
        together = self._micro_batch_size * replicas
        if self.global_batch_size % together:
            raise ValueError(
                f"global_batch_size={self.global_batch_size} is not a multiple of batch_size={self._micro_batch_size} x "
                f"{replicas} ranks with data of their own = {together}. Choose a multiple for every number of ranks that "
                "the job may have."
            )
        trainer.accumulate_grad_batches = self.global_batch_size // together

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # What Lightning warns of when a run goes on in the middle of an epoch is what this callback is for.
        warnings.filterwarnings("ignore", message=".*your dataloader is not resumable.*")
        self._take_over(trainer)

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._micro_batches = 0
        self._take_over(trainer)  # a loader that was made anew for this epoch

    def _take_over(self, trainer: Trainer) -> None:
        """Put our order of samples into the loader and start it again."""
        loader = _only_loader(trainer.train_dataloader)
        batches = loader.batch_sampler
        assert isinstance(batches, BatchSampler)
        if isinstance(batches.sampler, SharedOrder):
            return
        batches.sampler = _share(batches.sampler, loader, trainer)
        batches.sampler.set_epoch(trainer.current_epoch)
        here = self._skip // num_data_ranks(trainer)
        if here < len(batches.sampler):  # else the epoch had been seen to its end
            batches.sampler.skip_once = here
            self._micro_batches = here // self._micro_batch_size
        self._skip = 0
        restart_loading(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._micro_batches += 1

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._micro_batches = 0

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        steps = self._micro_batches // trainer.accumulate_grad_batches
        checkpoint[type(self).__name__] = {
            "global_batch_size": self.global_batch_size,
            "samples": steps * self.global_batch_size,
            "accumulate": trainer.accumulate_grad_batches,
        }

    @override
    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get(type(self).__name__)
        if saved is None:
            log.warning(
                "The checkpoint was written without KeepGlobalBatch: an epoch that had begun starts over with its data."
            )
            return
        if saved["global_batch_size"] != self.global_batch_size:
            raise ValueError(
                f"The checkpoint was written with a global batch of {saved['global_batch_size']} samples and this run has "
                f"{self.global_batch_size}: steps and samples would no longer match. Keep the former, or load the weights "
                "alone."
            )
        self._skip = int(saved["samples"])
        _recount(checkpoint["loops"]["fit_loop"], saved["accumulate"], trainer.accumulate_grad_batches)


class SharedOrder(DistributedSampler[Any]):
    """One seeded order for all ranks, dealt out in turn, of which the first epoch may skip what was seen."""

    skip_once = 0
    """Samples of this rank that the next iteration leaves out."""

    @override
    def __iter__(self) -> Iterator[Any]:
        skipped, self.skip_once = self.skip_once, 0
        for index, sample in enumerate(super().__iter__()):
            if index >= skipped:
                yield sample


def _share(sampler: Sampler[Any] | Any, loader: "DataLoader[Any]", trainer: Trainer) -> SharedOrder:
    if type(sampler) not in (RandomSampler, SequentialSampler, DistributedSampler):
        raise ValueError(
            f"KeepGlobalBatch deals out samples in an order of its own, and the loader has a {type(sampler).__name__}. Give "
            "the DataLoader a batch_size and shuffle=True or False."
        )
    shuffle = sampler.shuffle if isinstance(sampler, DistributedSampler) else isinstance(sampler, RandomSampler)
    kwargs = trainer.strategy.distributed_sampler_kwargs  # type: ignore[attr-defined]
    if trainer.world_size == 1:
        kwargs = {"num_replicas": 1, "rank": 0}
    seed = sampler.seed if isinstance(sampler, DistributedSampler) else int(os.environ.get("PL_GLOBAL_SEED", "0"))
    return SharedOrder(loader.dataset, shuffle=shuffle, seed=seed, **kwargs)


def _only_loader(loaders: Any) -> "DataLoader[Any]":
    if isinstance(loaders, DataLoader):
        return loaders
    raise ValueError(f"KeepGlobalBatch needs one DataLoader for training and found {type(loaders).__name__}.")


def _micro_batch_size(loader: "DataLoader[Any]") -> int:
    if loader.batch_size is None:
        raise ValueError(
            "KeepGlobalBatch needs a DataLoader with a batch_size: with a batch_sampler of its own, or batches that the "
            "data set makes, it is not known which samples a step has seen."
        )
    return loader.batch_size


def _recount(fit_loop: dict[str, Any], before: int, now: int) -> None:
    """Count micro-batches as this run makes them: as many per step as it accumulates.

    Counters that run behind (a checkpoint is written before the batch counts as completed) stay as far behind.
    """
    for counters in (fit_loop[_PROGRESS]["current"], fit_loop[_PROGRESS]["total"]):
        ready = counters["ready"]
        counted = ready // before * now
        for name, value in list(counters.items()):
            counters[name] = max(0, counted - (ready - value))
