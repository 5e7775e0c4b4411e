"""The caching allocator's rules, one by one."""

import pytest

from lightning_shard.simulate.allocator import FREED, MIB, CachingAllocator, OutOfMemoryError, round_up, segment_size
from lightning_shard.simulate.reserve import Trace, replay


@pytest.mark.parametrize(
    ("request_bytes", "segment_bytes"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB),
        (100 * MIB + 512, 102 * MIB),
    ],
)
def test_a_request_gets_a_segment_of_its_class(request_bytes: int, segment_bytes: int) -> None:
    assert segment_size(request_bytes) == segment_bytes
    allocator = CachingAllocator()
    allocator.malloc(1, request_bytes)
    assert allocator.reserved_bytes == segment_bytes


def test_requests_are_rounded_up_to_512_bytes() -> None:
    allocator = CachingAllocator()
    allocator.malloc(1, 1)
    allocator.malloc(2, 513)
    assert allocator.allocated_bytes == 512 + 1024
    assert round_up(0, 512) == 0


def test_small_requests_share_a_segment_and_never_take_from_a_large_one() -> None:
    allocator = CachingAllocator()
    allocator.malloc(1, 12 * MIB)
    allocator.free(1)
    allocator.malloc(2, 512)
    allocator.malloc(3, 512)
    assert allocator.reserved_bytes == 12 * MIB + 2 * MIB


def test_best_fit_takes_the_smallest_block_that_holds_it() -> None:
    allocator = CachingAllocator()
    for tensor, size in ((1, 40 * MIB), (2, 30 * MIB), (3, 20 * MIB)):
        allocator.malloc(tensor, size)
    for tensor in (1, 2, 3):
        allocator.free(tensor)
    allocator.malloc(4, 25 * MIB)
    allocator.malloc(5, 40 * MIB)  # still whole
    assert allocator.reserved_bytes == 90 * MIB


def test_a_large_block_is_split_only_where_more_than_one_mib_is_left() -> None:
    allocator = CachingAllocator()
    allocator.malloc(1, 20 * MIB)
    allocator.free(1)
    allocator.malloc(2, 19 * MIB)
    assert allocator.allocated_bytes == 20 * MIB  # the last MiB stays with it
    allocator.free(2)
    allocator.malloc(3, 18 * MIB)
    assert allocator.allocated_bytes == 18 * MIB
    allocator.malloc(4, 2 * MIB)
    assert allocator.reserved_bytes == 20 * MIB


@pytest.mark.parametrize("order", [(1, 2, 3), (1, 3, 2), (2, 1, 3), (3, 2, 1), (2, 3, 1), (3, 1, 2)])
def test_neighbours_merge_whatever_the_order_they_are_freed_in(order: tuple[int, ...]) -> None:
    allocator = CachingAllocator()
    allocator.malloc(0, 30 * MIB)
    allocator.free(0)
    for tensor in (1, 2, 3):
        allocator.malloc(tensor, 10 * MIB)
    assert allocator.reserved_bytes == 30 * MIB
    for tensor in order:
        allocator.free(tensor)
    allocator.malloc(4, 30 * MIB)
    assert allocator.reserved_bytes == 30 * MIB


def test_what_two_tensors_leave_does_not_serve_a_larger_one_across_segments() -> None:
    allocator = CachingAllocator()
    allocator.malloc(1, 20 * MIB)
    allocator.malloc(2, 20 * MIB)
    allocator.free(1)
    allocator.free(2)
    allocator.malloc(3, 40 * MIB)
    assert allocator.reserved_bytes == 80 * MIB


def test_streams_have_pools_of_their_own() -> None:
    allocator = CachingAllocator()
    allocator.malloc(1, 20 * MIB, 0)
    allocator.free(1)
    allocator.malloc(2, 20 * MIB, 1)
    assert allocator.reserved_bytes == 40 * MIB


def test_expandable_segments_grow_instead_of_leaving_holes() -> None:
    fixed, expandable = CachingAllocator(), CachingAllocator(expandable_segments=True)
    for allocator in (fixed, expandable):
        allocator.malloc(1, 40 * MIB)
        allocator.free(1)
        allocator.malloc(2, 60 * MIB)
    assert fixed.reserved_bytes == 100 * MIB
    assert expandable.reserved_bytes == 60 * MIB


def test_expandable_segments_grow_by_pages() -> None:
    allocator = CachingAllocator(expandable_segments=True)
    allocator.malloc(1, 21 * MIB)
    assert allocator.reserved_bytes == 40 * MIB
    allocator.malloc(2, 512)
    assert allocator.reserved_bytes == 42 * MIB


def test_a_full_device_gives_its_cache_back_and_then_fails() -> None:
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    allocator.malloc(1, 60 * MIB)
    allocator.free(1)
    allocator.malloc(2, 80 * MIB)
    assert allocator.num_retries == 1
    assert allocator.reserved_bytes == 80 * MIB
    with pytest.raises(OutOfMemoryError, match="needs a segment of"):
        allocator.malloc(3, 40 * MIB)


def test_expandable_segments_give_pages_back() -> None:
    allocator = CachingAllocator(capacity_bytes=100 * MIB, expandable_segments=True)
    allocator.malloc(1, 20 * MIB)
    allocator.malloc(2, 60 * MIB)
    allocator.free(2)
    allocator.malloc(3, 60 * MIB, 1)
    assert allocator.num_retries == 1
    assert allocator.reserved_bytes == 80 * MIB


def test_the_second_step_frees_what_the_first_left_where_it_frees_what_it_found() -> None:
    """Two gradients of 20 MiB: made in backward (tensor 3), those of the step before (tensor 2) freed first."""
    trace = Trace(
        setup=((1, 20 * MIB, 0),),
        state=(),
        gradients=((2, 20 * MIB, 0),),
        step=((2, FREED, 0), (3, 20 * MIB, 0)),
    )
    assert replay(trace).peak_reserved_bytes == 40 * MIB
