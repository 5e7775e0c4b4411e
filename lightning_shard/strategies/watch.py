"""How ranks agree to stop after the same batch, and learn which of them failed, with no collective and no wait.

Each rank runs a thread that talks to the job's key-value store. A request, on any rank, is settled in rounds: every
thread says which batch its rank is at, the first rank proposes a later one, every thread answers whether its rank is
still before it, and all do as the verdict says. A rank that reaches the proposed batch before the verdict waits there;
the others' threads answer whatever their ranks are busy with, so nobody waits for a rank that waits for it.
"""

import logging
import os
import sys
import threading
import time
from typing import Protocol

POLL_S = 0.1
"""Between looks at the store."""
BUSY_POLL_S = 0.01
"""The same while ranks are settling when to stop."""
BEAT_S = 1.0
"""Between signs of life."""
LEAD_S = 0.2
"""How far ahead the first proposal lies; it doubles while some rank was past it when it heard."""
MAX_LEAD_S = 10.0
SILENT_S = 5.0
"""After so long without one, a rank is called silent."""
WORRY_S = 60.0
"""After so long the rank before it says so, while the run still waits: some backends end a process without an error."""
EXIT_GRACE_S = 5.0
"""How long a rank may still end by itself after another one failed."""

log = logging.getLogger(__name__)


class Store(Protocol):
    """What is asked of the store: nothing that waits."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class Watch:
    """One rank's view of the job.

    Args:
        store: shared by all ranks; every watch of a job has a part of its own. None for a single rank.
        rank: this one.
        num_ranks: all of them.
    """

    def __init__(self, store: Store | None, rank: int, num_ranks: int) -> None:
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._lock = threading.Lock()
        self._batch = 0
        self.requested = False
        """Whether this rank was asked."""
        self._wanted: int | None = None
        self._round = 0
        self._stage = "idle"
        self._stop_at: int | None = None
        self._verdict = threading.Event()
        self._agreed: int | None = None
        self._ended = threading.Event()
        self._failure_seen_s: float | None = None
        self._pace = 0.0
        self._started_s = 0.0
        self._refused = 0
        self._beaten = (0.0, 0)
        self._moved_s = 0.0
        """When this rank was last seen at a new batch."""
        self._worried = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._started_s = time.time()
        if self._store is not None:
            self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Watch no longer: this rank leaves training."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(10 * POLL_S)

    def request(self, number: int) -> None:
        """Ask that all ranks stop for signal ``number``; safe in a signal handler."""
        self.requested = True
        self._wanted = number

    def at_batch(self) -> int | None:
        """Called by every rank before each batch; the signal's number where all ranks stop here.

        Costs a lock and a comparison, unless this is the batch that was proposed.
        """
        if self._store is None:
            number, self._wanted = self._wanted, None
            return number
        with self._lock:
            self._batch += 1
            wait = self._stop_at is not None and self._batch >= self._stop_at
        if not wait:
            return None
        while not self._verdict.wait(POLL_S):
            if self._ended.is_set():
                return None
        with self._lock:
            number, self._agreed, self._stop_at = self._agreed, None, None
            self._verdict.clear()
        return number

    def report_failure(self, error: BaseException) -> None:
        """Tell the other ranks what ended this one; the first failure counts."""
        if self._store is not None and not self._store.check(["failed"]):
            text = f"{type(error).__name__}: {error}"
            self._store.set("failed", f"{self._rank} {text[:2000]}")

    def first_failure(self) -> tuple[int, str] | None:
        """The rank that failed first, and its error."""
        if self._store is None or not self._store.check(["failed"]):
            return None
        rank, _, text = self._store.get("failed").decode().partition(" ")
        return int(rank), text

    def silent_ranks(self) -> list[tuple[int, float, int]]:
        """Ranks that gave no sign of life lately: rank, seconds since the last one, batch it was at."""
        found = []
        for rank in range(self._num_ranks if self._store is not None else 0):
            if rank != self._rank and self._store is not None and self._store.check([f"beat/{rank}"]):
                when, batch = self._store.get(f"beat/{rank}").decode().split()
                if time.time() - float(when) > SILENT_S:
                    found.append((rank, time.time() - float(when), int(batch)))
        return found

    def explain(self, error: BaseException) -> list[str]:
        """Report what ended this rank; what is known of others that the error itself does not say."""
        self.report_failure(error)
        failure = self.first_failure()
        notes = []
        if failure is not None and failure[0] != self._rank:
            notes.append(f"Rank {failure[0]} failed first: {failure[1]}")
        for rank, silent_s, batch in self.silent_ranks():
            notes.append(f"Rank {rank} has not answered for {silent_s:.0f} s; it was at batch {batch} of this run.")
        if not notes:
            for rank, batch in self.ranks_behind():
                notes.append(
                    f"Rank {rank} is alive but still at batch {batch} of this run, and this rank waited for it at batch "
                    f"{self._batch}: it may hang in its data, or in a hook."
                )
        return notes

    def ranks_behind(self) -> list[tuple[int, int]]:
        """Ranks that gave signs of life from an earlier batch while this one waited in its own: rank and batch."""
        if self._store is None or time.time() - self._moved_s < 2 * BEAT_S:
            return []
        found = []
        for rank in range(self._num_ranks):
            if rank != self._rank and self._store.check([f"beat/{rank}"]):
                when, batch = self._store.get(f"beat/{rank}").decode().split()
                if float(when) > self._moved_s + BEAT_S and int(batch) < self._batch:
                    found.append((rank, int(batch)))
        return found

    def unanswered_s(self) -> float:
        """Seconds since the store last answered this rank."""
        return time.time() - (self._beaten[0] or self._started_s)

    # --- the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._ended.wait(BUSY_POLL_S if self._stage != "idle" else POLL_S):
                self._beat()
                self._look_for_failure()
                self._settle()
        except Exception as error:  # the store is gone: the run is over, or about to end for that reason
            log.debug("The watch of rank %s ends: %s", self._rank, error)
            self._ended.set()

    def _beat(self) -> None:
        now, (before, batch) = time.time(), self._beaten
        if now - before >= BEAT_S:
            at = self._batch
            self._pace = (at - batch) / (now - before) if before else 0.0
            self._shared.set(f"beat/{self._rank}", f"{now} {at}")
            if at != batch or not before:
                self._moved_s = now
            self._beaten = now, at
            self._look_at_neighbour()

    def _look_at_neighbour(self) -> None:
        """Say it where the next rank is silent: one look per rank and beat, however many there are."""
        rank = (self._rank + 1) % self._num_ranks
        if not self._worried and self._shared.check([f"beat/{rank}"]):
            when, batch = self._shared.get(f"beat/{rank}").decode().split()
            if time.time() - float(when) > WORRY_S and not self._ended.is_set():
                self._worried = True
                sys.stderr.write(
                    f"Rank {rank} has not answered for {WORRY_S:.0f} s; it was at batch {batch} of this run.\n"
                )
                sys.stderr.flush()

    def _look_for_failure(self) -> None:
        failure = self.first_failure()
        if failure is None or failure[0] == self._rank:
            return
        self._failure_seen_s = self._failure_seen_s or time.monotonic()
        if time.monotonic() - self._failure_seen_s > EXIT_GRACE_S and not self._ended.is_set():
            sys.stderr.write(f"Rank {self._rank} ends because rank {failure[0]} failed first: {failure[1]}\n")
            sys.stderr.flush()
            os._exit(1)  # the main thread waits inside a collective, where nothing else reaches it

    @property
    def _shared(self) -> Store:
        assert self._store is not None
        return self._store

    def _settle(self) -> None:
        """One step of the agreement, if there is anything to agree on."""
        if self._wanted is not None and self._stage == "idle":
            self._shared.set(f"request/{self._round}", str(self._wanted))
            self._wanted = None
        step = {"idle": self._say_where, "asked": self._propose, "proposed": self._answer, "answered": self._decide}
        step.get(self._stage, self._obey)()

    def _say_where(self) -> None:
        if self._shared.check([f"request/{self._round}"]):
            self._shared.set(f"at/{self._round}/{self._rank}", str(self._batch))
            self._stage = "asked" if self._rank == 0 else "proposed"

    def _propose(self) -> None:
        keys = [f"at/{self._round}/{rank}" for rank in range(self._num_ranks)]
        if self._shared.check(keys):
            lead_s = min(LEAD_S * 2**self._refused, MAX_LEAD_S)
            batch = max(int(self._shared.get(key)) for key in keys) + 2 + int(self._batches_per_s() * lead_s)
            self._shared.set(f"stop/{self._round}", str(batch))
            self._stage = "proposed"

    def _batches_per_s(self) -> float:
        return self._pace or self._batch / max(time.time() - self._started_s, BUSY_POLL_S)

    def _answer(self) -> None:
        if self._shared.check([f"stop/{self._round}"]):
            batch = int(self._shared.get(f"stop/{self._round}"))
            with self._lock:
                in_time = self._batch < batch
                if in_time:
                    self._verdict.clear()
                    self._stop_at = batch
            self._shared.set(f"answer/{self._round}/{self._rank}", str(int(in_time)))
            self._stage = "answered" if self._rank == 0 else "waiting"

    def _decide(self) -> None:
        keys = [f"answer/{self._round}/{rank}" for rank in range(self._num_ranks)]
        if self._shared.check(keys):
            agreed = all(int(self._shared.get(key)) for key in keys)
            self._shared.set(f"verdict/{self._round}", str(int(agreed)))
            self._stage = "waiting"

    def _obey(self) -> None:
        if not self._shared.check([f"verdict/{self._round}"]):
            return
        agreed = bool(int(self._shared.get(f"verdict/{self._round}")))
        number = int(self._shared.get(f"request/{self._round}"))
        self._round += 1
        self._refused = 0 if agreed else self._refused + 1
        self._stage = "idle"
        with self._lock:
            armed = self._stop_at is not None
            self._agreed = number if agreed else None
            if not agreed:
                self._wanted = number  # asked for again, with more room
            elif self._wanted == number:
                self._wanted = None  # the same signal came to several ranks
            if armed:
                self._verdict.set()
