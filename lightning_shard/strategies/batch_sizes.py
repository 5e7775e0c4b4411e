"""Lightning's batch size finder on many ranks: a size fits where it fits on all of them.

The finder runs the loop with one size after another and takes torch's error for the end. A rank that meets it leaves the
others waiting in a collective; so each trial is watched and voted on as the first steps of a run are (``oom.py``): the
groups are aborted, the ranks meet again, the module is laid out anew by the same plan, and every rank gets the error.
"""

import dataclasses
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_shard._compat.trainer import is_oom_error, take_over_size_finders
from lightning_shard.plans import Plan
from lightning_shard.strategies.laid_out import LaidOutStrategy
from lightning_shard.strategies.oom import OomFlag


class SizeSearchStrategy(LaidOutStrategy):
    """Lets Lightning's BatchSizeFinder search, and its trials be voted on."""

    _finding_size = False
    """Whether the steps that run are trials."""

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.lightning_module is not None:
            take_over_size_finders(self.lightning_module.trainer, self._search_size)

    def lay_out_anew(self, plan: Plan) -> DeviceMesh | None:
        """Lay the module out by ``plan`` in mid-run, from the layout it has, a unit at a time; a collective.

        Returns:
            The mesh over which shards of the layout before can be gathered, where there were some.
        """
        raise NotImplementedError

    @contextmanager
    def _search_size(self) -> Iterator[Callable[[Callable[[], Any]], None]]:
        vote, plan = SizeVote(self), self.plan
        by_ddp = isinstance(self.model, DistributedDataParallel)
        if by_ddp:  # its reducer cannot be called back from a reduction that a rank is missing in
            self.lay_out_anew(dataclasses.replace(plan, torch_ddp=False))
        self._finding_size = True
        try:
            yield vote.try_size
        finally:
            self._finding_size = False
        if by_ddp:
            self.lay_out_anew(plan)


_finders = 0
"""Searches so far in this process: the same number on all ranks, so that keys in the store differ."""


class SizeVote:
    """The trials of one search.

    Args:
        strategy: a ``PlanStrategy`` that has laid the module out.

    Raises:
        RuntimeError: on all ranks, where the module is sharded.
    """

    def __init__(self, strategy: Any) -> None:
        global _finders
        _finders += 1
        self._strategy = strategy
        self._num_trials = 0
        if strategy.world_size > 1 and strategy.sharded:
            raise RuntimeError(
                "BatchSizeFinder runs until memory is out, after which the groups that hold shards cannot be made again. Let "
                "`lightning-shard plan --micro-batch-size N` say what fits, or find the size under TunedDDPStrategy."
            )
        if strategy.world_size > 1 and (strategy._needs_torch_ddp() or strategy.plan.static_graph):
            raise RuntimeError(
                "BatchSizeFinder runs until memory is out, which torch's DDP does not survive, and an option of DDP or a saved "
                "buffer (batch statistics) asks for it here. Find the size on one device, or without them."
            )
        self._flag = OomFlag(strategy, f"sizes/{_finders}") if strategy.world_size > 1 else None

    def try_size(self, run: Callable[[], Any]) -> None:
        """Run the loop with the size that is set.

        Raises:
            torch.OutOfMemoryError: on all ranks when it did not go through on one of them.
        """
        self._num_trials += 1
        strategy, failed = self._strategy, self._attempt(run)
        if failed is None:
            return
        strategy.forget_step()
        strategy._end_watch()
        for parameter in strategy.lightning_module.parameters():
            parameter.grad = None
        mine = {"failed": failed}
        everyone = [mine] if self._flag is None else self._flag.meet_again(mine)
        gc.collect()
        if self._flag is not None:
            strategy.lay_out_again()
        where = ", ".join(str(rank) for rank, row in enumerate(everyone) if row["failed"])
        # In the words by which Lightning knows the error.
        raise torch.OutOfMemoryError(f"CUDA out of memory, or the host's, on rank {where}.")

    def _attempt(self, run: Callable[[], Any]) -> str | None:
        """None, or why it did not go through: empty where another rank is the reason."""
        flag = self._flag
        if flag is not None:
            flag.watch()
        try:
            run()
            if flag is not None:
                flag.vote(f"trial {self._num_trials}")
        except Exception as error:
            if is_oom_error(error) or isinstance(error, torch.OutOfMemoryError):
                if flag is not None:
                    flag.raise_flag()
                return str(error).splitlines()[0]
            if flag is None or not flag.is_up:
                raise
            return ""
        finally:
            if flag is not None:
                flag.stop_watching()
        return None
