"""Which examples make each optimizer step, the same for any number of devices, and which rank gets which."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, DistributedSampler
from typing_extensions import override

Item = TypeVar("Item")

GROUPED_BATCHES = 50
"""Global batches among which examples of like length are brought together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deal:
    """How the examples of one optimizer step are dealt out.

    Micro-batch ``a`` of rank ``r`` takes slots ``(a * ranks + r) * micro_batch_size`` and on. Where the global batch
    does not fill all slots, the last ones stay empty: with a loss that counts tokens they change nothing.
    """

    global_batch_size: int
    """Examples per optimizer step, over all ranks."""
    micro_batch_size: int
    """Examples per rank and forward pass."""
    ranks: int = 1
    """Ranks that see different data."""
    rank: int = 0

    @property
    def accumulate(self) -> int:
        """Micro-batches per optimizer step."""
        return math.ceil(self.global_batch_size / (self.ranks * self.micro_batch_size))

    def num_micro_batches(self, num_examples: int) -> int:
        """Of this rank, for that many examples over all ranks."""
        whole, rest = divmod(num_examples, self.global_batch_size)
        return whole * self.accumulate + math.ceil(rest / (self.ranks * self.micro_batch_size))

    def micro_batches(self, examples: Iterable[Item], empty: Item) -> Iterator[list[Item]]:
        """This rank's micro-batches, in order; every rank gets the same number."""
        remaining = iter(examples)
        while batch := list(islice(remaining, self.global_batch_size)):
            yield from self._of_one_step(batch, empty)

    def _of_one_step(self, batch: list[Item], empty: Item) -> Iterator[list[Item]]:
        width = self.ranks * self.micro_batch_size
        filled = batch + [empty] * (-len(batch) % width)
        for start in range(self.rank * self.micro_batch_size, len(filled), width):
            yield filled[start : start + self.micro_batch_size]


class GlobalOrder(DistributedSampler[Any]):
    """Indices of this rank's examples, micro-batch by micro-batch.

    The order follows from seed and epoch alone, not from the number of ranks. A distributed sampler, so that
    Lightning leaves it in place. Index ``len(lengths)`` stands for an empty example.

    Args:
        lengths: tokens of every example.
        deal: how they are dealt out.
        shuffle: a new order in every epoch; otherwise that of the data.
        group_by_length: bring examples of like length into one batch. The longest batch comes first, so that a run
            that does not fit fails at once.
        seed: of the order.
        progress: epoch, and micro-batches of it that are done already; asked when the first index is.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        deal: Deal,
        *,
        shuffle: bool,
        group_by_length: bool = False,
        seed: int = 0,
        progress: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        super().__init__(range(len(lengths)), deal.ranks, deal.rank, shuffle=shuffle, seed=seed)  # type: ignore[arg-type]
        self._lengths = lengths
        self._deal = deal
        self._group = group_by_length
        self._progress = progress

    @override
    def __len__(self) -> int:
        return self._deal.num_micro_batches(len(self._lengths)) * self._deal.micro_batch_size

    @override
    def __iter__(self) -> Iterator[int]:
        epoch, done = self._progress()
        batches = self._deal.micro_batches(self.order(epoch), len(self._lengths))
        for batch in islice(batches, done, None):
            yield from batch

    def order(self, epoch: int) -> list[int]:
        """Every example once."""
        generator, number = torch.Generator().manual_seed(self.seed + epoch), len(self._lengths)
        order = torch.randperm(number, generator=generator).tolist() if self.shuffle else list(range(number))
        return self._grouped(order, generator) if self._group else order

    def _grouped(self, order: list[int], generator: torch.Generator) -> list[int]:
        size = self._deal.global_batch_size
        batches: list[list[int]] = []
        for start in range(0, len(order), size * GROUPED_BATCHES):
            near = sorted(order[start : start + size * GROUPED_BATCHES], key=lambda i: -self._lengths[i])
            batches += [near[i : i + size] for i in range(0, len(near), size)]
        whole = [batch for batch in batches if len(batch) == size]
        rest = [index for batch in batches if len(batch) < size for index in batch]  # there is at most one such batch
        if self.shuffle and whole:
            longest = max(range(len(whole)), key=lambda i: self._lengths[whole[i][0]])
            others = [batch for i, batch in enumerate(whole) if i != longest]
            shuffled = torch.randperm(len(others), generator=generator).tolist()
            whole = [whole[longest], *(others[i] for i in shuffled)]
        return [index for batch in whole for index in batch] + rest


class LazyLoader(DataLoader[Any]):
    """Starts to read when its first batch is asked for: by then a resumed run knows where it is."""

    keeps_position = True
    """The strategy need not skip what was trained on."""

    @override
    def __iter__(self) -> Any:
        yield from super().__iter__()
