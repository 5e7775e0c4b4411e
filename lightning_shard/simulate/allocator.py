"""A model of PyTorch's CUDA caching allocator, to turn a trace of allocations into reserved bytes.

Written from the documented behaviour of ``c10/cuda/CUDACachingAllocator`` (torch 2.13): requests are rounded
up to 512 bytes and served, best fit first, from the free blocks of their stream and pool; what does not fit
any gets a new segment; blocks split when enough remains and merge again when freed. Fragmentation is then a
result, not a factor. No garbage collection threshold, no ``max_split_size``, no CUDA graphs, no
``record_stream`` (FSDP2 and DDP keep references instead).
"""

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

KIB, MIB = 2**10, 2**20
ROUND_BYTES = 512
"""Every request is a multiple of this."""
SMALL_BYTES = MIB
"""Requests up to this size live in the small pool."""
SMALL_SEGMENT_BYTES = 2 * MIB
LARGE_SEGMENT_BYTES = 20 * MIB
"""A segment for a request of the large pool below :data:`OWN_SEGMENT_BYTES`."""
OWN_SEGMENT_BYTES = 10 * MIB
"""From here on a request gets a segment of its own size, rounded up to :data:`SEGMENT_ROUND_BYTES`."""
SEGMENT_ROUND_BYTES = 2 * MIB
ADDRESS_SPACE_BYTES = 2**48
"""Addresses set aside for one expandable segment."""

Event = tuple[int, int, int]
"""(tensor, bytes, stream): an allocation; or (tensor, -1, 0): its end."""
FREED = -1


class OutOfMemoryError(RuntimeError):
    """The replayed trace needs more than the device has."""


@dataclass(eq=False, slots=True)
class _Block:
    """A piece of a segment. Neighbours are linked by address."""

    size: int
    pool: "_Pool"
    free: bool = True
    mapped: bool = True
    """False for the part of an expandable segment that no memory stands behind yet."""
    before: "_Block | None" = None
    after: "_Block | None" = None
    address: int = 0
    """Lower addresses are taken first among free blocks of one size."""

    @property
    def can_grow(self) -> bool:
        """Whether it is the last mapped block of an expandable segment."""
        return self.after is not None and not self.after.mapped


@dataclass(eq=False, slots=True)
class _Pool:
    """Free blocks of one stream and size class, smallest first."""

    small: bool
    free: list[tuple[int, int, _Block]] = field(default_factory=list)
    tail: _Block | None = None
    """The unmapped end of the pool's expandable segment."""

    def add(self, block: _Block) -> None:
        bisect.insort(self.free, (block.size, block.address, block))

    def remove(self, block: _Block) -> None:
        del self.free[bisect.bisect_left(self.free, (block.size, block.address))]

    def best_fit(self, size: int) -> _Block | None:
        """The smallest free block that holds ``size``; the one that could still grow only when it is the last."""
        index = bisect.bisect_left(self.free, (size,))
        if index == len(self.free):
            return None
        block = self.free[index][2]
        if block.can_grow and index + 1 < len(self.free):
            block = self.free[index + 1][2]
        return block

    @property
    def page_bytes(self) -> int:
        """Granularity in which an expandable segment grows."""
        return SMALL_SEGMENT_BYTES if self.small else LARGE_SEGMENT_BYTES


class CachingAllocator:
    """Replays allocations and frees.

    Args:
        expandable_segments: one growing segment per pool and stream instead of many fixed ones
            (``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``).
        capacity_bytes: what the device has for segments; None means there is always more.
    """

    def __init__(self, *, expandable_segments: bool = False, capacity_bytes: int | None = None) -> None:
        self._expandable = expandable_segments
        self._capacity = capacity_bytes
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._taken: dict[int, _Block] = {}
        self._next_address = 0
        self.allocated_bytes = 0
        """Rounded bytes in use (a block is not always split, so its size may be larger)."""
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self.num_retries = 0
        """Times the cache had to be emptied because the device was full."""

    def replay(self, events: Iterable[Event]) -> "CachingAllocator":
        """Carry out a trace; returns itself."""
        for tensor, size, stream in events:
            if size == FREED:
                self.free(tensor)
            else:
                self.malloc(tensor, size, stream)
        return self

    def malloc(self, tensor: int, size: int, stream: int = 0) -> None:
        """Allocate ``size`` bytes under a name that :meth:`free` will know.

        Raises:
            OutOfMemoryError: when the device is full even without any cached segment.
        """
        if size == 0:
            return
        size = round_up(size, ROUND_BYTES)
        small = size <= SMALL_BYTES
        pool = self._pools.setdefault((stream, small), _Pool(small))
        block = pool.best_fit(size)
        if block is not None:
            pool.remove(block)
        else:
            block = self._grow(pool, size)
        self._split(block, size)
        block.free = False
        self._taken[tensor] = block
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)

    def free(self, tensor: int) -> None:
        """Give a tensor's block back to its pool; a name that is not known (an empty tensor) is ignored."""
        block = self._taken.pop(tensor, None)
        if block is None:
            return
        self.allocated_bytes -= block.size
        block.free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free and neighbour.mapped:
                block.pool.remove(neighbour)
                block = _merge(block, neighbour)
        block.pool.add(block)

    def empty_cache(self) -> None:
        """Return to the device every segment (or page of an expandable one) that nothing uses."""
        for pool in self._pools.values():
            for _, _, block in list(pool.free):
                if self._expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:
                    pool.remove(block)
                    self.reserved_bytes -= block.size

    def _grow(self, pool: _Pool, size: int) -> _Block:
        if self._expandable:
            return self._expand(pool, size)
        segment_bytes = segment_size(size)
        self._reserve(segment_bytes)
        return _Block(segment_bytes, pool, address=self._new_address(segment_bytes))

    def _expand(self, pool: _Pool, size: int) -> _Block:
        """Map pages behind the last block of the pool's segment; a free last block is used as well."""
        if pool.tail is None:
            pool.tail = _Block(0, pool, mapped=False, address=self._new_address(ADDRESS_SPACE_BYTES))
        tail = pool.tail
        last = tail.before if tail.before is not None and tail.before.free and tail.before.mapped else None
        pages_bytes = round_up(size - (last.size if last else 0), pool.page_bytes)
        self._reserve(pages_bytes)
        # Emptying the cache may have unmapped the last block.
        last = tail.before if tail.before is not None and tail.before.free and tail.before.mapped else None
        if last is not None:
            pool.remove(last)
            last.size += pages_bytes
            tail.address += pages_bytes
            return last
        block = _Block(pages_bytes, pool, address=tail.address)
        tail.address += pages_bytes
        _link(tail.before, block)
        _link(block, tail)
        return block

    def _reserve(self, num_bytes: int) -> None:
        if self._capacity is not None and self.reserved_bytes + num_bytes > self._capacity:
            self.num_retries += 1
            self.empty_cache()
            if self.reserved_bytes + num_bytes > self._capacity:
                raise OutOfMemoryError(
                    f"The allocator holds {self.reserved_bytes} bytes in use and needs a segment of {num_bytes} more, "
                    f"above the {self._capacity} the device has."
                )
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def _split(self, block: _Block, size: int) -> None:
        """Cut what ``size`` leaves over off the end of ``block``, where the rules say that it is worth it."""
        left = block.size - size
        if left < ROUND_BYTES or (left <= SMALL_BYTES and not block.pool.small and not self._expandable):
            return
        rest = _Block(left, block.pool, address=block.address + size)
        block.size = size
        _link(rest, block.after)
        _link(block, rest)
        block.pool.add(rest)

    def _unmap(self, block: _Block) -> None:
        """Give back the whole pages of a free block at the end of an expandable segment."""
        if block.after is None or block.after.mapped:
            return  # pages in the middle could be unmapped too; rare enough to leave them
        pages_bytes = block.size // block.pool.page_bytes * block.pool.page_bytes
        if not pages_bytes:
            return
        block.pool.remove(block)
        block.size -= pages_bytes
        block.after.address -= pages_bytes
        self.reserved_bytes -= pages_bytes
        if block.size:
            block.pool.add(block)
        else:
            _link(block.before, block.after)

    def _new_address(self, num_bytes: int) -> int:
        """A range of addresses that nothing else has."""
        self._next_address += num_bytes
        return self._next_address - num_bytes


def round_up(size: int, multiple: int) -> int:
    """``size`` rounded up to a multiple."""
    return -(-size // multiple) * multiple


def segment_size(size: int) -> int:
    """Bytes of the new segment that a (rounded) request of ``size`` bytes gets."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return round_up(size, SEGMENT_ROUND_BYTES)


def _link(left: _Block | None, right: _Block | None) -> None:
    if left is not None:
        left.after = right
    if right is not None:
        right.before = left


def _merge(one: _Block, other: _Block) -> _Block:
    """Two neighbours as one block, the lower one."""
    low, high = (one, other) if one.after is other else (other, one)
    low.size += high.size
    _link(low, high.after)
    return low
