"""Ranks of any pace agree on one batch, whatever moment they are asked at. Threads and a dict in place of ranks."""

import threading
import time

import pytest

from lightning_shard import TunedDDPStrategy
from lightning_shard.strategies import stops
from lightning_shard.strategies import watch as watch_module
from lightning_shard.strategies.watch import Watch


class DictStore:
    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)


class Ranks:
    """Threads that step together, as ranks do whose gradients are reduced."""

    def __init__(self, num_ranks: int, pause_s: float, max_batches: int = 200_000) -> None:
        store = DictStore()
        self.watches = [Watch(store, rank, num_ranks) for rank in range(num_ranks)]
        self.stopped: list[tuple[int, int] | None] = [None] * num_ranks
        self._together = threading.Barrier(num_ranks)
        self._pause_s, self._max_batches = pause_s, max_batches
        self._threads = [threading.Thread(target=self._train, args=(rank,), daemon=True) for rank in range(num_ranks)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> list[tuple[int, int] | None]:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        return self.stopped

    def _train(self, rank: int) -> None:
        watch = self.watches[rank]
        watch.start()
        for batch in range(self._max_batches):
            number = watch.at_batch()
            if number is not None:
                self.stopped[rank] = (number, batch)
                break
            time.sleep(self._pause_s)
            self._together.wait(30)  # a rank ahead waits for the others here, not in the watch
        watch.end()


@pytest.mark.parametrize("pause_s", [0.0, 0.002, 0.3], ids=["as fast as can be", "fast", "slow"])
def test_all_stop_at_the_same_batch(pause_s: float) -> None:
    ranks = Ranks(3, pause_s)
    ranks.start()
    time.sleep(0.3)
    ranks.watches[2].request(15)
    first, *others = ranks.join()
    assert first is not None
    assert first[0] == 15
    assert others == [first, first]


def test_a_signal_to_every_rank_stops_once() -> None:
    ranks = Ranks(2, 0.001)
    ranks.start()
    for watch in ranks.watches:
        watch.request(2)
    first, second = ranks.join()
    assert first == second is not None


def test_a_run_that_ends_before_it_agrees_just_ends() -> None:
    ranks = Ranks(2, 0.0, max_batches=20)
    ranks.watches[0].request(15)
    ranks.start()
    first, second = ranks.join()
    assert first == second


def test_one_rank_needs_no_store() -> None:
    watch = Watch(None, 0, 1)
    watch.start()
    assert watch.at_batch() is None
    watch.request(15)
    assert watch.at_batch() == 15


def test_failures_and_silence_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    store = DictStore()
    one, two = Watch(store, 0, 2), Watch(store, 1, 2)
    two.report_failure(ValueError("bad batch"))
    one.report_failure(RuntimeError("connection closed"))
    assert one.first_failure() == two.first_failure() == (1, "ValueError: bad batch")
    two._beat()
    assert one.silent_ranks() == []
    monkeypatch.setattr(watch_module, "SILENT_S", -1.0)
    ((rank, _, batch),) = one.silent_ranks()
    assert (rank, batch) == (1, 0)


def test_a_rank_that_lives_but_stays_behind_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    store = DictStore()
    one, two = Watch(store, 0, 2), Watch(store, 1, 2)
    for batch in range(5):
        one.at_batch()
        if batch < 4:
            two.at_batch()
    one._beat()
    assert one.ranks_behind() == []  # who moved a moment ago waits for nobody yet
    one._moved_s -= 100
    two._beat()
    assert one.ranks_behind() == [(1, 4)]
    (note,) = one.explain(RuntimeError("Timed out"))
    assert "Rank 1 is alive but still at batch 4" in note


def test_the_next_rank_is_watched_while_the_run_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = DictStore()
    one, two = Watch(store, 0, 2), Watch(store, 1, 2)
    two._beat()
    one._beat()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(watch_module, "WORRY_S", -1.0)
    for _ in range(2):
        one._look_at_neighbour()
    assert capsys.readouterr().err.count("Rank 1 has not answered") == 1  # once


class StoppedStore(DictStore):
    """Of a process that was stopped: no answer, ever."""

    def check(self, keys: list[str]) -> bool:
        threading.Event().wait()
        raise AssertionError


class LostStore(DictStore):
    """Of a process that has ended."""

    def check(self, keys: list[str]) -> bool:
        raise ConnectionError("closed")


@pytest.mark.parametrize(
    ("store", "told"), [(StoppedStore, "Rank 0 has not answered for"), (LostStore, "Rank 0 has ended")]
)
def test_the_keeper_of_the_store_is_named_without_waiting_for_it(
    store: type[DictStore], told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stops, "ANSWER_S", 0.2)
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    strategy = TunedDDPStrategy()
    strategy._explain(Watch(store(), 1, 2), RuntimeError("Timed out"))
    assert told in caplog.text
