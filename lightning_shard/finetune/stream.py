"""Rows that are read, tokenised and dealt out while training runs."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch.utils.data import IterableDataset
from typing_extensions import override

from lightning_shard.finetune.batches import Item, Truncation, within
from lightning_shard.finetune.encode import Example
from lightning_shard.finetune.order import Deal
from lightning_shard.finetune.packing import pack
from lightning_shard.finetune.rows import Row

PACKED_ROWS = 512
"""Rows of the source among which packing looks for ones that fit together."""

NOTHING = Example([], [])


@dataclass(kw_only=True)
class Stream(IterableDataset[Item]):
    """This rank's items, in an order that follows from seed and epoch alone, resumed where training stopped.

    Every rank reads every row, but without packing tokenises only its own. A row with nothing to learn keeps its
    place as an empty item, so that all ranks agree on the order without talking.
    """

    rows: Callable[[int], Iterator[Row]]
    """The source's rows after the first so many."""
    encode: Callable[[Row], Example]
    deal: Deal
    empty: Example
    longest: int
    truncation: Truncation
    packing: bool
    shuffle_buffer: int
    """Rows that are shuffled among themselves; 1 keeps the source's order."""
    limit: int | None
    """Rows of an epoch."""
    seed: int
    progress: Callable[[], tuple[int, int]]

    @override
    def __iter__(self) -> Iterator[Item]:
        epoch, done = self.progress()
        if self.packing:
            batches = islice(self.deal.micro_batches(self._packed(epoch), (self.empty,)), done, None)
            return (item for batch in batches for item in batch)
        return self._plain(epoch, done)

    def _plain(self, epoch: int, done: int) -> Iterator[Item]:
        steps, rest = divmod(done, self.deal.accumulate)
        rows: Iterator[Row | None] = self._shuffled(epoch, steps * self.deal.global_batch_size)
        for batch in islice(self.deal.micro_batches(rows, None), rest, None):
            for row in batch:
                yield (self.empty if row is None else self._first(row),)

    def _first(self, row: Row) -> Example:
        return next(within(self.encode(row), self.longest, self.truncation), self.empty)

    def _packed(self, epoch: int) -> Iterator[Item]:
        rows = self._shuffled(epoch, 0)
        while some := list(islice(rows, PACKED_ROWS)):
            parts = [part for row in some for part in within(self.encode(row), self.longest, self.truncation)]
            for group in pack([len(part.input_ids) for part in parts], self.longest):
                yield tuple(parts[i] for i in group)

    def _shuffled(self, epoch: int, skip: int) -> Iterator[Row]:
        """Rows after the first ``skip`` of the epoch's order; buffers before that are passed over unread."""
        buffers, rest = divmod(skip, self.shuffle_buffer)
        start = buffers * self.shuffle_buffer
        rows: Iterable[Row] = islice(self.rows(start), None if self.limit is None else max(0, self.limit - start))
        remaining = iter(rows)
        for number in range(buffers, 2**62):
            buffer = list(islice(remaining, self.shuffle_buffer))
            if not buffer:
                return
            generator = torch.Generator().manual_seed((self.seed + epoch) * 1_000_003 + number)
            order = torch.randperm(len(buffer), generator=generator).tolist()
            yield from (buffer[i] for i in order[rest:])
            rest = 0
