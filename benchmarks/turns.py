"""Step several engines in turn, in one process, and time each step of each.

What slows the machine down then slows all of them. An engine is any training loop that iterates over the loader it
is given: it runs in a thread of its own, which only runs while it is its turn, and its step lasts from the moment it
gets a batch until it asks for the next one.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shard.testing import count_collectives

COUNTED_STEP = 2
"""By then optimizer state is there, and checks that run once have run."""
PATIENCE_S = 300.0


@dataclass
class Measured:
    """What one engine did on this rank."""

    times_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)


class Turn:
    """One engine's loader, and the door between it and the others."""

    def __init__(self, batches: Iterable[Tensor], length: int, per_step: int, device: str) -> None:
        self._batches = batches
        self._length = length
        self._per_step = per_step
        self._device = device
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._losses: list[Tensor] = []
        self.measured = Measured()
        self.error: BaseException | None = None
        self.parts: Callable[[], tuple[Any, Any]] | None = None
        """Gives the model and its optimizer; set by the engine, for what is counted in the third step."""

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Tensor]:
        for index, batch in enumerate(self._batches):
            first, last = index % self._per_step == 0, index % self._per_step == self._per_step - 1
            if first:
                self._pass()
                counting = contextlib.ExitStack()
                if index // self._per_step == COUNTED_STEP:
                    self._count(counting)
                self._synchronise()
                start = time.perf_counter()
            yield batch
            if last:
                self._synchronise()
                self.measured.times_s.append(time.perf_counter() - start)
                counting.close()

    def _count(self, stack: contextlib.ExitStack) -> None:
        """Count what this step sends, and what is held when it ends."""
        collectives = stack.enter_context(count_collectives())

        def note() -> None:
            facts = self.measured.facts
            facts["collectives"] = {kind: [n, collectives.num_bytes[kind]] for kind, n in collectives.counts.items()}
            facts["sent_bytes"] = sent_bytes(facts["collectives"])
            if self.parts is not None:
                facts["held_bytes"] = held_bytes(*self.parts())

        stack.callback(note)

    def record(self, loss: Tensor) -> None:
        """Note the loss of a micro-batch."""
        self._losses.append(loss.detach())

    def run(self, engine: Callable[["Turn"], None]) -> None:
        """The engine's thread."""
        self._go.acquire()
        try:
            engine(self)
        except BaseException as error:  # told by the main thread
            self.error = error
        self.measured.losses = [float(loss) for loss in self._losses]
        self._losses.clear()
        self._stopped.release()

    def take(self) -> None:
        """Let the engine run until its next step, or its end."""
        self._go.release()
        if not self._stopped.acquire(timeout=PATIENCE_S):
            raise TimeoutError(f"A step did not end within {PATIENCE_S:g} s.")
        if self.error is not None:
            raise self.error

    def _pass(self) -> None:
        self._stopped.release()
        self._go.acquire()

    def _synchronise(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


def sent_bytes(collectives: dict[str, list[int]]) -> int:
    """Bytes a rank sends for collectives that go around a ring: (n-1)/n of the whole, an all-reduce twice that."""
    return sent_over(collectives, dist.get_world_size() if dist.is_initialized() else 1)


def sent_over(collectives: dict[str, list[int]], n: int, *, shards: int | None = None) -> int:
    """The same for a given number of ranks; ``shards``: how many of them gather and scatter, where all-reduces are of all."""
    rounds = {"all_gather": (1, shards or n), "reduce_scatter": (1, shards or n), "all_reduce": (2, n)}
    sent = 0.0
    for kind, (_, size) in collectives.items():
        times, ranks = rounds.get(kind, (0, 1))
        sent += times * size * (ranks - 1) / ranks
    return int(sent)


def held_bytes(model: Any, optimizer: Any) -> int:
    """Weights, gradients and optimizer state of this rank between two steps; what shares memory counts once."""
    tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if isinstance(t, Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values())


def take_turns(
    engines: dict[str, Callable[[Turn], None]],
    make_batches: Callable[[], Iterable[Tensor]],
    *,
    steps: int,
    accumulate: int = 1,
    device: str = "cpu",
) -> dict[str, Measured]:
    """Run all engines, a step each in turn: A B C, B C A, C A B... All ranks must name them in the same order.

    Not every loop asks whether there is another batch after the last one, so the last step is not timed.
    """
    turns = {name: Turn(make_batches(), steps * accumulate, accumulate, device) for name in engines}
    for name, engine in engines.items():
        threading.Thread(target=turns[name].run, args=(engine,), name=name, daemon=True).start()
    waiting = deque(turns.values())
    for _ in range(steps + 1):  # to the first step, then a step at a time, the last one to the end
        waiting.rotate(-1)  # who goes first may find caches and memory in another state
        for turn in waiting:
            if dist.is_initialized():
                dist.barrier()
            turn.take()
    return {name: turn.measured for name, turn in turns.items()}
