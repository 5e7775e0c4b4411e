"""From a tracked step to the bytes the caching allocator and the device need."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lightning_shard.memory.overheads import COLLECTIVE_BYTES, CONTEXT_BYTES
from lightning_shard.simulate.allocator import FREED, CachingAllocator, Event


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """What is allocated and freed around one step."""

    setup: tuple[Event, ...]
    """Weights, buffers, buckets: before any step."""
    state: tuple[Event, ...]
    """The optimizer's state, which a first step makes."""
    gradients: tuple[Event, ...]
    """The gradients that the step finds."""
    step: tuple[Event, ...]
    """One step."""


def replay(trace: Trace, *, expandable_segments: bool = False, capacity_bytes: int | None = None) -> CachingAllocator:
    """Two steps through the allocator: the second meets the cache that the first, without state, has cut up.

    Workspaces that libraries take from the allocator (cuBLAS) are part of the device's constant.
    """
    allocator = CachingAllocator(expandable_segments=expandable_segments, capacity_bytes=capacity_bytes)
    allocator.replay(trace.setup)
    first = [(-2 - tensor, size, stream) for tensor, size, stream in trace.step]
    allocator.replay(first).replay(trace.state).replay(_second(trace, first))
    return allocator


def device_bytes(reserved_bytes: int, world_size: int) -> int:
    """What the device must have: context and libraries, and with more than one rank the buffers of collectives.

    Constants of :mod:`lightning_shard.memory.overheads`, where their sources stand.
    """
    return reserved_bytes + CONTEXT_BYTES + (COLLECTIVE_BYTES if world_size > 1 else 0)


def _second(trace: Trace, first: Sequence[Event]) -> Iterator[Event]:
    """The second step, in which the first step's gradients end where the trace ends those it found."""
    stand_ins = {tensor for tensor, _, _ in trace.gradients}
    left_over = _still_alive(first)
    for event in trace.step:
        if event[0] not in stand_ins:
            yield event
        elif left_over:
            yield from ((tensor, FREED, 0) for tensor in left_over)
            left_over = []


def _still_alive(events: Sequence[Event]) -> list[int]:
    alive: dict[int, None] = {}
    for tensor, size, _ in events:
        if size == FREED:
            alive.pop(tensor, None)
        else:
            alive[tensor] = None
    return list(alive)
