"""A data module whose optimizer steps hold the same rows on any number of ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_shard._compat.trainer import num_data_ranks
from lightning_shard.finetune.fit import recut
from lightning_shard.finetune.limits import require_at_least
from lightning_shard.finetune.order import Deal, GlobalOrder, LazyLoader


class DealtData(LightningDataModule):
    """Deals rows out to ranks and micro-batches, and goes on with the very next row when a run is resumed.

    Args:
        micro_batch_size: rows per rank and forward pass; None until it is chosen.
        global_batch_size: rows per optimizer step over all ranks; None leaves that to micro-batch and accumulation.
        validation_batch_size: rows per rank in validation; by default the same as in training.
        shuffle: a new order of the training rows in every epoch.
        num_workers: processes that collate batches.
        seed: of the order.
    """

    def __init__(
        self,
        *,
        micro_batch_size: int | None,
        global_batch_size: int | None,
        validation_batch_size: int | None,
        shuffle: bool,
        num_workers: int,
        seed: int,
    ) -> None:
        super().__init__()
        sizes = {
            "data.micro_batch_size": micro_batch_size,
            "data.global_batch_size": global_batch_size,
            "data.validation_batch_size": validation_batch_size,
        }
        require_at_least(1, **sizes)
        require_at_least(0, **{"data.num_workers": num_workers, "data.seed": seed})
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = global_batch_size
        self.validation_batch_size = validation_batch_size
        self.shuffle = shuffle
        self.num_workers = num_workers
        self.seed = seed
        self.restored: dict[str, int] = {}
        """Of the checkpoint that this run goes on from: micro-batches per optimizer step then."""
        self._accumulate = 1

    def rows_per_step(self) -> int | None:
        """The global batch in rows; None where micro-batch, ranks and accumulation make it."""
        return self.global_batch_size

    def deal(self) -> Deal:
        """How training rows are dealt out.

        Raises:
            ValueError: when the Trainer's ``accumulate_grad_batches`` contradicts the global batch.
        """
        ranks, rank = self._ranks()
        size = self.micro_batch_size or 1
        accumulate = 1 if self.trainer is None else int(self.trainer.accumulate_grad_batches)
        rows = self.rows_per_step()
        if rows is not None and accumulate not in (1, self._accumulate):
            raise ValueError(
                f"trainer.accumulate_grad_batches={accumulate} and a global batch size both say how many micro-batches make "
                "an optimizer step. Leave accumulate_grad_batches at 1."
            )
        rows = rows or ranks * size * accumulate
        return Deal(global_batch_size=rows, micro_batch_size=size, ranks=ranks, rank=rank)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed, "accumulate": self._accumulate}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seed = state_dict["seed"]
        self.restored = {"accumulate": state_dict["accumulate"]}

    def settled_deal(self) -> Deal:
        """The same, with the Trainer's accumulation set to it."""
        deal = self.deal()
        if self.trainer is not None and self.rows_per_step() is not None:
            self.trainer.accumulate_grad_batches = deal.accumulate
        self._accumulate = deal.accumulate
        return deal

    def training_loader(
        self, items: Sequence[Any], lengths: Sequence[int], empty: Any, collate: Any, *, group_by_length: bool = False
    ) -> DataLoader[Any]:
        """Batches of this rank's items; ``empty`` fills what the global batch leaves open."""
        deal = self.settled_deal()
        order = GlobalOrder(
            lengths,
            deal,
            shuffle=self.shuffle,
            group_by_length=group_by_length,
            seed=self.seed,
            progress=self.progress,
        )
        return self.loader([*items, empty], deal.micro_batch_size, collate, sampler=order)

    def validation_loader(self, items: Sequence[Any], empty: Any, collate: Any) -> DataLoader[Any]:
        """The same for validation, in the order of the data: each item counts once on any number of ranks."""
        size = self.validation_batch_size or self.micro_batch_size or 1
        ranks, rank = self._ranks()
        deal = Deal(global_batch_size=ranks * size, micro_batch_size=size, ranks=ranks, rank=rank)
        order = GlobalOrder([0] * len(items), deal, shuffle=False)
        return self.loader([*items, empty], size, collate, sampler=order)

    def loader(self, items: Any, batch_size: int, collate: Any, **order: Any) -> DataLoader[Any]:
        """A loader that asks where training stands when its first batch is wanted."""
        pin = torch.cuda.is_available()
        workers = self.num_workers
        return LazyLoader(items, batch_size, collate_fn=collate, num_workers=workers, pin_memory=pin, **order)

    def progress(self) -> tuple[int, int]:
        """Epoch, and micro-batches of it that are done: what Lightning's loop counts and restores."""
        if self.trainer is None or self.trainer.state.fn != TrainerFn.FITTING:
            return 0, 0
        loop = self.trainer.fit_loop
        current: Any = loop.epoch_progress.current
        batches = loop.epoch_loop.batch_progress
        before = self.restored.get("accumulate", 0)
        if not before:
            return current.processed, batches.current.ready
        # A resumed stream is read ahead, before Lightning has gone over to the next epoch and before go_on.
        return current.processed + batches.is_last_batch, recut(self.trainer, before)

    def _ranks(self) -> tuple[int, int]:
        if self.trainer is None:
            return 1, 0
        kwargs: dict[str, int] | None = getattr(self.trainer.strategy, "distributed_sampler_kwargs", None)
        return num_data_ranks(self.trainer), kwargs["rank"] if kwargs else 0
