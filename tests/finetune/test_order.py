"""Which rows make an optimizer step: the same on any number of ranks, and after a resume."""

from collections.abc import Iterator
from itertools import zip_longest

import pytest

from lightning_shard.finetune.encode import IGNORED, Example
from lightning_shard.finetune.order import Deal, GlobalOrder
from lightning_shard.finetune.rows import Row
from lightning_shard.finetune.stream import Stream

LENGTHS = [7, 3, 9, 1, 4, 8, 2, 6, 5, 3, 7, 9, 2]


def steps(ranks: int, micro: int, global_batch_size: int, **options: bool) -> list[list[int]]:
    """The rows of every optimizer step, over all ranks, sorted."""
    deals = [
        Deal(global_batch_size=global_batch_size, micro_batch_size=micro, ranks=ranks, rank=rank)
        for rank in range(ranks)
    ]
    per_rank = [list(GlobalOrder(LENGTHS, deal, seed=3, **{"shuffle": True, **options})) for deal in deals]
    assert {len(indices) for indices in per_rank} == {len(GlobalOrder(LENGTHS, deals[0], shuffle=True))}
    size = deals[0].accumulate * micro
    windows = [[indices[i : i + size] for i in range(0, len(indices), size)] for indices in per_rank]
    return [sorted(i for part in parts for i in part if i < len(LENGTHS)) for parts in zip(*windows, strict=True)]


@pytest.mark.parametrize(
    "options", [{}, {"shuffle": False}, {"group_by_length": True}], ids=["shuffled", "plain", "grouped"]
)
@pytest.mark.parametrize(("ranks", "micro"), [(1, 4), (1, 1), (2, 1), (2, 2), (4, 1), (3, 1), (8, 1)])
def test_steps_hold_the_same_rows_on_any_number_of_ranks(ranks: int, micro: int, options: dict[str, bool]) -> None:
    expected = steps(1, 4, 4, **options)
    assert steps(ranks, micro, 4, **options) == expected
    assert sorted(i for step in expected for i in step) == list(range(len(LENGTHS)))
    assert [len(step) for step in expected] == [4, 4, 4, 1]


def test_epochs_differ_and_a_seed_repeats_them() -> None:
    deal = Deal(global_batch_size=4, micro_batch_size=2, ranks=2)
    first, again, other = (GlobalOrder(LENGTHS, deal, shuffle=True, seed=seed) for seed in (1, 1, 2))
    assert first.order(0) == again.order(0)
    assert first.order(0) != first.order(1)
    assert first.order(0) != other.order(0)


def test_examples_of_like_length_share_a_batch_and_the_longest_comes_first() -> None:
    deal = Deal(global_batch_size=3, micro_batch_size=3)
    order = GlobalOrder(LENGTHS, deal, shuffle=True, group_by_length=True, seed=0).order(0)
    batches = [[LENGTHS[i] for i in order[start : start + 3]] for start in range(0, 12, 3)]
    assert batches[0] == [9, 9, 8]
    assert sorted(batches) == [[3, 2, 2], [5, 4, 3], [7, 7, 6], [9, 9, 8]]
    assert LENGTHS[order[12]] == 1


@pytest.mark.parametrize("group", [True, False])
def test_a_resumed_epoch_goes_on_with_the_very_next_row(group: bool) -> None:
    deal = Deal(global_batch_size=4, micro_batch_size=1, ranks=2, rank=1)
    whole = list(GlobalOrder(LENGTHS, deal, shuffle=True, group_by_length=group, progress=lambda: (2, 0)))
    resumed = list(GlobalOrder(LENGTHS, deal, shuffle=True, group_by_length=group, progress=lambda: (2, 3)))
    assert resumed == whole[3:]


# --- streams -------------------------------------------------------------------------------------------------------


def stream(rank: int = 0, ranks: int = 1, micro: int = 1, done: int = 0, **options: object) -> list[list[int]]:
    """The items of a stream of 21 rows; row i is one token i, twice as long where i is divisible by 5."""

    def rows(skip: int) -> Iterator[Row]:
        return (Row(place="", text=str(i)) for i in range(skip, 21))

    def encode(row: Row) -> Example:
        number = int(row.text or 0)
        ids = [number] * (4 if number % 5 == 0 else 2)
        return Example(ids, [IGNORED] * len(ids) if number == 13 else ids)

    settings = {"packing": False, "shuffle_buffer": 6, "limit": None, **options}
    items = Stream(
        rows=rows,
        encode=encode,
        deal=Deal(global_batch_size=4, micro_batch_size=micro, ranks=ranks, rank=rank),
        empty=Example([99], [IGNORED]),
        longest=8,
        truncation="end",
        seed=5,
        progress=lambda: (1, done),
        **settings,  # type: ignore[arg-type]
    )
    return [sorted({token for example in item for token in example.input_ids}) for item in items]


def seen(items: list[list[int]]) -> list[int]:
    return sorted(token for item in items for token in item if token != 99)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_stream_gives_each_row_once_over_all_ranks(packing: bool, ranks: int) -> None:
    per_rank = [stream(rank, ranks, packing=packing) for rank in range(ranks)]
    assert len({len(items) for items in per_rank}) == 1
    assert sorted(i for items in per_rank for i in seen(items)) == [i for i in range(21) if i != 13]


@pytest.mark.parametrize("packing", [False, True])
def test_a_streams_steps_hold_the_same_rows_on_any_number_of_ranks(packing: bool) -> None:
    (one,) = [stream(packing=packing)]
    two = [stream(rank, 2, packing=packing) for rank in range(2)]
    dealt = [item for pair in zip_longest(*two, fillvalue=[99]) for item in pair]
    assert [item for item in dealt if item != [99]] == [item for item in one if item != [99]]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("done", [1, 2, 5])
def test_a_stream_resumes_at_the_very_next_row(packing: bool, done: int) -> None:
    assert stream(1, 2, packing=packing, done=done) == stream(1, 2, packing=packing)[done:]


def test_a_stream_is_shuffled_within_its_buffer_and_limited() -> None:
    order = [token for item in stream() for token in item if token != 99]
    assert order != sorted(order)
    assert set(order[:6]) == set(range(6))
    assert [token for item in stream(shuffle_buffer=1, limit=9) for token in item if token != 99] == list(range(9))
