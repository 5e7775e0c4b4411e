"""The ranks meet before their process group is made: who is missing or does not belong is named in seconds.

A process group waits for its members in silence, half an hour by default, and then names nobody. Here every
rank writes itself on a roll in the store that the group will use; rank 0 reads it and tells all the verdict.
"""

import atexit
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from lightning_shard.strategies.peers import Peer, describe_missing, find_fault, missing_ranks, note_unequal_memory

log = logging.getLogger(__name__)

Store = Any
"""A torch.distributed.Store, whose stubs lack half of its methods."""
REMIND_S = 10.0
"""Seconds after which those that are missing are named, and again at this interval."""
POLL_S = 0.05
GRACE_S = 3.0
"""How long rank 0 keeps a fault to itself while ranks are missing."""
LEAVE_S = 5.0
"""How long rank 0 keeps the store open so that the others read a bad verdict."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the ranks meet."""

    address: str
    port: int
    timeout_s: float
    hosted: bool
    """Whether a launcher's agent keeps the store (torchrun) rather than rank 0."""


def launcher_hosts_store() -> bool:
    """Whether torchrun's agents keep a store for their workers."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def meet(me: Peer, place: Place) -> Store:
    """Wait for all ranks and make sure that they belong together.

    Rank 0 calls, by leaving a word in the store that no earlier run of it knows; every rank answers with its line of the
    roll; rank 0 judges and tells those who answered. Workers that died before an elastic restart have left their words in
    the same store: they do not answer.

    Returns:
        A store for this meeting alone, for the process group: an elastic launcher's outlives its workers, and addresses
        of dead ones must not be found in it.

    Raises:
        RuntimeError: on every rank that is there, with the ranks and hosts at fault: missing ones after the
            time-out, a wrong world size, rank, version or wish as soon as it is seen.
    """
    deadline = time.monotonic() + place.timeout_s
    server = _open(me, place, deadline)
    try:
        call, fault = _Meeting(server, me, deadline).hold()
    except (dist.DistError, ConnectionError) as error:
        raise RuntimeError(
            f"{me.name.capitalize()} lost the store at {place.address}:{place.port} while the ranks met: rank 0 ended. Look "
            "at its output for the cause."
        ) from error
    if fault is not None:
        raise RuntimeError(fault)
    return _store_class("PrefixStore")(f"lightning_shard/group/{call}", server)


def open_group(
    store: Store, rank: int, world_size: int, backend: str, device: torch.device, timeout: timedelta | None
) -> None:
    """Make the process group in a store that no earlier group has used. NCCL wants it destroyed before the end."""
    on_gpu = device.type != "cpu"
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device if on_gpu else None
    )
    if "nccl" in backend:
        atexit.register(_close_group)


def _close_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class _Meeting:
    """One rank's part in a meeting."""

    def __init__(self, server: Store, me: Peer, deadline: float) -> None:
        self._store: Store = _store_class("PrefixStore")("lightning_shard/meeting", server)
        self._me, self._deadline = me, deadline
        self._mine = f"{me.uid}" if me.rank == 0 else None
        """The word with which this rank calls, where it is rank 0."""
        self._answered: set[str] = set()
        self._peers: list[Peer] = []
        self._remind = time.monotonic() + REMIND_S
        self._tell_at: float | None = None

    def hold(self) -> tuple[str, str | None]:
        """The word of the call that this rank was counted in, and what is wrong."""
        if self._mine is not None:
            self._store.set("call", self._mine)
        pause_s = POLL_S
        while True:
            call = self._store.get("call").decode() if self._store.check(["call"]) else None
            if call is not None:
                self._answer(call)
                if call == self._mine:
                    self._judge(call)
                verdict = self._verdict(call)
                if verdict is not None:
                    self._leave(call, bad=verdict[1] is not None)
                    return verdict
            if time.monotonic() >= self._deadline + (0 if call == self._mine else 2 * LEAVE_S):
                raise RuntimeError(
                    f"{self._me.name.capitalize()} waited in vain for rank 0 to call the ranks together: it did not come up, "
                    "or did not get as far as setting up its strategy. Look at its output."
                )
            time.sleep(pause_s)
            pause_s = min(1.0, pause_s * 1.2)

    def _answer(self, call: str) -> None:
        if call not in self._answered:
            self._answered.add(call)
            self._store.append(f"roll/{call}", self._me.to_json() + "\n")
            self._store.add(f"arrived/{call}", 1)

    def _judge(self, call: str) -> None:
        """Rank 0: read the roll, and tell once all are there, something is wrong, or time is up."""
        if self._store.check([f"verdict/{call}"]):
            return
        if self._store.add(f"arrived/{call}", 0) > len(self._peers):
            self._peers = Peer.read_roll(self._store.get(f"roll/{call}").decode())
        fault, now = find_fault(self._peers), time.monotonic()
        missing = missing_ranks(self._peers)
        if fault is not None and missing:  # those who are on their way shall hear of it too
            self._tell_at = self._tell_at or now + GRACE_S
            if now < min(self._tell_at, self._deadline):
                return
        if fault is None and missing:
            if now >= self._remind:
                log.warning("Waiting: %s.", describe_missing(self._peers))
                self._remind = now + REMIND_S
            if now < self._deadline:
                return
            fault = (
                f"Not all ranks came up in time: {describe_missing(self._peers)}. Look at the output of their nodes; raise "
                "start_timeout if they only need longer."
            )
        if fault is None and (note := note_unequal_memory(self._peers)):
            log.warning(note)
        for peer in self._peers:
            self._store.set(f"counted/{call}/{peer.uid}", "")
        self._store.set(f"verdict/{call}", fault or "")

    def _verdict(self, call: str) -> tuple[str, str | None] | None:
        """What was told, where this rank was counted; an earlier run's verdict did not count it."""
        if not self._store.check([f"verdict/{call}", f"counted/{call}/{self._me.uid}"]):
            return None
        return call, self._store.get(f"verdict/{call}").decode() or None

    def _leave(self, call: str, *, bad: bool) -> None:
        """Rank 0 keeps the store open until all who answered have heard that they cannot go on."""
        read = self._store.add(f"read/{call}", 1)
        deadline = time.monotonic() + LEAVE_S
        while bad and self._mine is not None and read < len(self._peers) and time.monotonic() < deadline:
            time.sleep(POLL_S)
            read = self._store.add(f"read/{call}", 0)


def _store_class(name: str) -> Any:
    return getattr(dist, name)  # public, though the package does not export it to type checkers


def _open(me: Peer, place: Place, deadline: float) -> Store:
    """Serve the store on rank 0, or reach it there."""
    while True:
        left_s = max(1.0, deadline - time.monotonic())
        try:
            return within(left_s + LEAVE_S, partial(_connect, me, place, min(REMIND_S, left_s)))
        except (dist.DistError, TimeoutError) as error:
            if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
                raise RuntimeError(
                    f"Port {place.port} of {me.host} is in use, so {me.name} cannot open it for the other ranks: another "
                    "job, or a rest of an earlier one, holds it. End that, or set another MASTER_PORT on all nodes."
                ) from error
            if time.monotonic() >= deadline:
                raise RuntimeError(_unreachable(me, place)) from error
            log.warning("%s still cannot reach rank 0 at %s:%d.", me.name.capitalize(), place.address, place.port)


def _connect(me: Peer, place: Place, timeout_s: float) -> Store:
    return _store_class("TCPStore")(
        place.address,
        place.port,
        is_master=me.rank == 0 and not place.hosted,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
    )


def within(timeout_s: float, make: Callable[[], Any]) -> Any:
    """What ``make`` returns or raises. A store waits without end for an answer from a program that is none, so this
    asks in a thread, which is left behind where the answer does not come.
    """
    made: queue.Queue[Any] = queue.Queue()

    def ask() -> None:
        try:
            made.put(make())
        except BaseException as error:
            made.put(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = made.get(timeout=timeout_s)
    except queue.Empty:
        raise TimeoutError(f"no answer within {timeout_s:.0f} s") from None
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _unreachable(me: Peer, place: Place) -> str:
    who = "the launcher's store" if place.hosted else "rank 0"
    return (
        f"{me.name.capitalize()} could not reach {who} at {place.address}:{place.port} within {place.timeout_s:.0f} s: rank "
        "0's node did not come up, MASTER_ADDR or MASTER_PORT differ between nodes, or a firewall or another program on "
        "that port is in the way."
    )
