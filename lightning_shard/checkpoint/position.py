"""Where in its data a run was: a DataLoader that goes on in the middle of an epoch.

Lightning counts the batches but starts the loader again from its first one. Here the samplers draw what they drew
before, from the random state the epoch began with, and hand out only what is left.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_shard.checkpoint.random_state import random_state, random_state_of, set_random_state


class Position:
    """What a resumable loader remembers of the epoch it is in."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._sampler = getattr(loader.batch_sampler, "sampler", loader.sampler)
        self.num_batches = 0
        """Batches handed out in this epoch."""
        self.start: dict[str, Any] | None = None
        """Random state from which this epoch's order was drawn."""
        self.draw_from: dict[str, Any] | None = None
        """Random state from which a sampler that waits for its first turn draws what is left out."""
        self.resume: dict[str, Any] | None = None
        """What to go on from at the next iteration; then None."""

    def save(self, num_batches: int, *, finished: bool) -> dict[str, Any]:
        """Plain values and tensors, for a checkpoint.

        Args:
            num_batches: how many of those handed out were trained on (one may have been fetched ahead).
            finished: whether the epoch is over.
        """
        seed = getattr(self._sampler, "seed", None)
        position = {"num_batches": min(num_batches, self.num_batches), "start": self.start, "finished": finished}
        return {**position, "seed": seed if isinstance(seed, int) else None}

    def go_on(self, saved: dict[str, Any], now: dict[str, Any] | None, device: torch.device) -> None:
        """Have the next iteration go on from a saved position, with the random state ``now`` from its first batch on."""
        self.resume = {"position": saved, "random": now, "device": device}
        if saved["seed"] is not None and hasattr(self._sampler, "seed"):
            self._sampler.seed = saved["seed"]


def make_resumable(loader: Any) -> Position | None:
    """Have a DataLoader keep its position; None for any other kind of loader, or one that keeps its own (it says so by
    ``state_dict``, or ``keeps_position``).

    The loader stays the object it is, and an instance of its class.
    """
    if not isinstance(loader, DataLoader) or hasattr(loader, "state_dict") or hasattr(loader, "keeps_position"):
        return None
    position: Position | None = loader.__dict__.get("_position")
    if position is None:
        position = Position(loader)
        cls = type(loader)
        loader.__dict__["_position"] = position
        if not isinstance(loader.dataset, IterableDataset):
            _let_skip(loader.sampler if loader.batch_sampler is None else loader.batch_sampler, position)
        loader.__class__ = type(cls.__name__, (cls,), {"__iter__": _iterate(cls), "__module__": cls.__module__})
    return position


def _iterate(cls: type[DataLoader[Any]]) -> Callable[[DataLoader[Any]], Iterator[Any]]:
    def iterate(loader: DataLoader[Any]) -> Iterator[Any]:
        def start() -> Iterator[Any]:
            batches: Iterator[Any] = cls.__iter__(loader)
            return batches

        return _Batches(start, loader.__dict__["_position"], loader.dataset)

    return iterate


class _Batches:
    """An epoch's batches. Nothing is drawn before the first is asked for: hooks in between change no order."""

    def __init__(self, start: Callable[[], Iterator[Any]], position: Position, dataset: Any) -> None:
        self._start = start
        self._position = position
        self._indexed = not isinstance(dataset, IterableDataset)
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> "_Batches":
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = self._begin()
        batch = next(self._batches)
        self._position.num_batches += 1
        return batch

    def _begin(self) -> Iterator[Any]:
        position = self._position
        saved, position.resume = position.resume, None
        if saved is None or saved["position"]["finished"] or saved["position"]["start"] is None:
            if saved is not None and saved["random"] is not None:
                set_random_state(saved["random"], saved["device"])
            position.num_batches, position.start, position.draw_from = 0, random_state(), None
            return self._start()
        position.num_batches, position.start = saved["position"]["num_batches"], saved["position"]["start"]
        with random_state_of(position.start):
            batches = self._start()
            if not self._indexed:
                for _ in range(position.num_batches):
                    next(batches, None)
            position.draw_from = random_state()
        if saved["random"] is not None:
            set_random_state(saved["random"], saved["device"])
        return batches


def _let_skip(sampler: Any, position: Position) -> None:
    """Have a sampler leave out what was handed out before, once; it stays an instance of its class."""
    cls = type(sampler)

    def iterate(self: Any) -> Iterator[Any]:
        drawn = cls.__iter__(self)
        state, position.draw_from = position.draw_from, None
        with nullcontext() if state is None else random_state_of(state):  # with workers it is in force already
            for _ in range(position.num_batches):
                next(drawn, None)
        yield from drawn

    sampler.__class__ = type(cls.__name__, (cls,), {"__iter__": iterate, "__module__": cls.__module__})
