"""Where a run is besides its weights: random state and place in the data, rank by rank."""

import warnings
from typing import Any

from typing_extensions import override

from lightning_shard._compat import DDPStrategy, TrainerFn
from lightning_shard.checkpoint.position import Position, make_resumable
from lightning_shard.checkpoint.random_state import random_state, set_random_state, state_for_rank
from lightning_shard.parallelize.together import gather


class ProgressStrategy(DDPStrategy):
    """Keeps training loaders' positions and random state, and restores them."""

    _positions: tuple[Position, ...] = ()
    _ranks: list[dict[str, Any]] | None = None
    """Progress of every data-parallel rank in the checkpoint that is being resumed; None once it is taken up."""

    @override
    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        module = self.lightning_module
        if module is None or module.trainer.state.fn != TrainerFn.FITTING or not module.trainer.training:
            return dataloader
        if any(getattr(callback, "keeps_position", False) for callback in vars(module.trainer)["callbacks"]):
            return dataloader
        position = make_resumable(dataloader)
        if position is not None:
            self._positions = (*(p for p in self._positions if p is not position), position)
            self._resume(position, len(self._positions) - 1)
        return dataloader

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self._ranks is not None and not any(position.resume for position in self._positions):
            set_random_state(self._mine(self._ranks)["random"], self.root_device)
        self._ranks = None

    def _forget_progress(self) -> None:
        """Of an earlier run: its loaders, and a checkpoint that no training took up."""
        self._positions, self._ranks = (), None

    def progress_of_ranks(self) -> list[dict[str, Any]]:
        """Random state and positions of every data-parallel rank. Collective."""
        loop = self._trainer_loop()
        ready = loop.epoch_loop.batch_progress.current.ready
        finished = ready >= loop.max_batches
        mine = {
            "random": random_state(self.root_device),
            "positions": [position.save(ready, finished=finished) for position in self._positions],
        }
        return gather(mine)[:: self._ranks_per_batch]

    def resume_from(self, ranks: list[dict[str, Any]] | None) -> None:
        """Note what a checkpoint says of its ranks, until training starts."""
        self._ranks = ranks

    def _resume(self, position: Position, number: int) -> None:
        if self._ranks is None:
            return
        warnings.filterwarnings("ignore", ".*your dataloader is not resumable.*")  # it is
        mine = self._mine(self._ranks)
        if number < len(mine["positions"]):
            last = number == len(mine["positions"]) - 1
            position.go_on(mine["positions"][number], mine["random"] if last else None, self.root_device)

    def _mine(self, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        per_batch = self._ranks_per_batch
        rank, num_ranks = self.global_rank // per_batch, self.world_size // per_batch
        random = state_for_rank([of_rank["random"] for of_rank in ranks], rank, num_ranks)
        return {**ranks[min(rank, len(ranks) - 1)], "random": random}

    @property
    def _ranks_per_batch(self) -> int:
        """Ranks that see the same data."""
        return self.world_size // int(self.distributed_sampler_kwargs["num_replicas"])

    def _trainer_loop(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer.fit_loop
