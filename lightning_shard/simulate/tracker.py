"""Counts live tensor storages, operation by operation: on fake tensors in a simulation, on real ones in a test."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_shard._compat import DispatchMode, FakeTensor, in_backward
from lightning_shard.simulate.allocator import FREED, ROUND_BYTES, Event, round_up
from lightning_shard.simulate.collectives import collective
from lightning_shard.simulate.guesses import Guesses
from lightning_shard.simulate.patches import patched
from lightning_shard.simulate.result import MomentPeak

SETUP = "setup"
"""The moment before any step."""
_CAST = torch.ops.aten._to_copy.default
_PLAIN = (Tensor, nn.Parameter, FakeTensor)


class _Entry:
    """One live storage."""

    __slots__ = ("key", "kind", "num_bytes", "reference", "stream")

    def __init__(self, key: int, num_bytes: int, kind: str, stream: int, reference: Any) -> None:
        self.key = key
        self.num_bytes = num_bytes
        self.kind = kind
        self.stream = stream
        self.reference = reference


class Tracker(DispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation below autograd, and with it every new storage; a weak reference sees its end.

    Each storage has a kind: that of the innermost :meth:`during`, else ``backward`` inside a backward pass and
    ``activations`` outside. Operations of a DTensor come again as operations on its local tensor.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes: Counter[str] = Counter()
        """Live bytes by kind now."""
        self.allocated_bytes = 0
        self.moment = SETUP
        self.peaks: dict[str, MomentPeak] = {}
        """The fullest point of each moment."""
        self.events: list[Event] = []
        """The trace, for the allocator's replay."""
        self.marks: list[int] = []
        """Where in :attr:`events` a new part of the trace begins."""
        self.collectives: list[tuple[str, int]] = []
        """Kind and bytes of each."""
        self.guesses = Guesses()
        self._entries: dict[int, _Entry] = {}
        self._kinds: list[str] = []
        self._streams: dict[int, int] = {id(torch.cpu.current_stream()): 0}
        self._paused = 0
        self._num_keys = 0

    # --- what callers say ----------------------------------------------------------------------------

    @contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """What is allocated inside is of this kind."""
        self._kinds.append(kind)
        try:
            yield
        finally:
            self._kinds.pop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is counted inside (shape arithmetic that a real run does without memory)."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def adopt(self, tensor: Tensor, kind: str) -> None:
        """Count a tensor that exists already; one that is counted changes its kind."""
        storage = _local(tensor).untyped_storage()
        entry = self._entries.get(id(storage))
        if entry is None:
            self._add(storage, kind)
            return
        self.live_bytes[entry.kind] -= entry.num_bytes
        self.live_bytes[kind] += entry.num_bytes
        entry.kind = kind

    def adopt_gradient(self, tensor: Tensor) -> None:
        """Count a tensor among the gradients, unless a bucket or a flat buffer holds it."""
        if self.kind_of(tensor) not in ("ddp_buckets", "flat_gradients"):
            self.adopt(tensor, "gradients")

    def ignore(self, tensor: Tensor) -> None:
        """Count this tensor no longer, or never: a real run has it on the host."""
        storage = _local(tensor).untyped_storage()
        entry = self._entries.get(id(storage))
        if entry is None:
            self._track(storage, "host")
        else:
            self._resize(entry, 0)

    def kind_of(self, tensor: Tensor) -> str | None:
        """The kind of a counted tensor."""
        entry = self._entries.get(id(_local(tensor).untyped_storage()))
        return None if entry is None else entry.kind

    def mark(self) -> None:
        """A new part of the trace begins here."""
        self.marks.append(len(self.events))

    def enter_moment(self, name: str) -> None:
        """From here on peaks are those of this moment."""
        self.moment = name
        self._note_peak()

    # --- torch's hook ----------------------------------------------------------------------------------

    @override
    def __enter__(self) -> Any:
        self._patch = patched(torch.UntypedStorage, "resize_", self._resizing(torch.UntypedStorage.resize_))
        self._patch.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    @override
    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._patch.__exit__(*exception)

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(each in _PLAIN for each in types):
            return NotImplemented  # a tensor made of tensors: its operations come again on those
        called = collective(func, args)
        if called is not None and not self._paused:
            self.collectives.append(called)
        counted = not self._paused and "optimizer_step" not in self._kinds  # optimizers ask for their step count
        result = self.guesses.run(func, args, kwargs or {}, counted=counted)
        if not self._paused and not func.is_view:
            self._see(result, "compute_copies" if self._copies_a_weight(func, args) else self._kind())
        return result

    def _copies_a_weight(self, func: Any, args: Any) -> bool:
        """Whether this is a weight's cast to the type it computes in, ours or autocast's."""
        return func is _CAST and not self._kinds and self.kind_of(args[0]) in ("trained_weights", "frozen_weights")

    def _see(self, result: Any, kind: str) -> None:
        if isinstance(result, Tensor):
            storage = result.untyped_storage()
            if id(storage) not in self._entries:
                self._add(storage, kind)
        elif isinstance(result, (list, tuple)):
            for each in result:
                self._see(each, kind)

    # --- counting --------------------------------------------------------------------------------------

    def _kind(self) -> str:
        if self._kinds:
            return self._kinds[-1]
        return "backward" if in_backward() else "activations"

    def _add(self, storage: torch.UntypedStorage, kind: str) -> None:
        self._resize(self._track(storage, kind), storage.nbytes())

    def _track(self, storage: torch.UntypedStorage, kind: str) -> _Entry:
        name = id(storage)
        stream = self._streams.setdefault(id(torch.cpu.current_stream()), len(self._streams))
        self._num_keys += 1
        reference = ref(storage, lambda _: self._end(name))
        entry = _Entry(self._num_keys, 0, kind, stream, reference)
        self._entries[name] = entry
        return entry

    def _end(self, name: int) -> None:
        entry = self._entries.pop(name)
        self._resize(entry, 0)

    def _resize(self, entry: _Entry, num_bytes: int) -> None:
        new = round_up(num_bytes, ROUND_BYTES)
        if new == entry.num_bytes:
            return
        if entry.num_bytes:
            self.events.append((entry.key, FREED, 0))
            self._num_keys += 1
            entry.key = self._num_keys
        if new:
            self.events.append((entry.key, new, entry.stream))
        self.live_bytes[entry.kind] += new - entry.num_bytes
        self.allocated_bytes += new - entry.num_bytes
        grows, entry.num_bytes = new > entry.num_bytes, new
        if grows:
            self._note_peak()

    def _note_peak(self) -> None:
        peak = self.peaks.get(self.moment)
        if peak is None or self.allocated_bytes > peak.allocated_bytes:
            kinds = {kind: size for kind, size in self.live_bytes.items() if size}
            self.peaks[self.moment] = MomentPeak(name=self.moment, allocated_bytes=self.allocated_bytes, kinds=kinds)

    def _resizing(self, original: Any) -> Any:
        """``UntypedStorage.resize_``, through which FSDP2 frees and refills gathered weights."""

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            entry = self._entries.get(id(storage))
            if entry is not None:
                entry.stream = self._streams.setdefault(id(torch.cpu.current_stream()), len(self._streams))
                self._resize(entry, storage.nbytes())
            return result

        return resize_


def _local(tensor: Tensor) -> Tensor:
    # Not to_local(): its gradient-aware view is of no use here.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
