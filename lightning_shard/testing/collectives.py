"""Count the collectives of a piece of code: how many, of which kind, and how many bytes."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from typing_extensions import override

from lightning_shard._compat.groups import EXCHANGES

KINDS = {
    "all_gather": ("_allgather_base_", "allgather_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
                   "all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_gather_into_tensor_out"),
    "reduce_scatter": ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_",
                       "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "reduce_scatter_tensor_out"),
    "all_reduce": ("allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_", "all_reduce_coalesced",
                   "all_reduce_coalesced_"),
    "broadcast": ("broadcast_", "broadcast"),
    "all_to_all": ("alltoall_", "alltoall_base_", "all_to_all_single", "shard_dim_alltoall"),
    "reduce": ("reduce_",),
    "gather": ("gather_",),
    "scatter": ("scatter_",),
    "send": ("send",),
    "recv": ("recv_", "recv_any_source_"),
    "barrier": ("barrier", "monitored_barrier_"),
}  # fmt: skip
"""Kind to the names of torch's operators that carry it out."""

_KIND_OF = {operator: kind for kind, operators in KINDS.items() for operator in operators}
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")


@dataclass(slots=True)
class Collectives:
    """What was counted, in the order in which it was issued."""

    calls: list[tuple[str, int]] = field(default_factory=list)
    """Kind and bytes of each: the whole, gathered side of it (the input of a reduce-scatter)."""

    def __getitem__(self, kind: str) -> int:
        """How many there were of a kind.

        Raises:
            KeyError: for a kind there is no such collective of.
        """
        if kind not in KINDS:
            raise KeyError(f"{kind!r} is no kind of collective; they are {', '.join(KINDS)}.")
        return self.counts[kind]

    @property
    def counts(self) -> Counter[str]:
        """Calls by kind."""
        return Counter(kind for kind, _ in self.calls)

    @property
    def num_bytes(self) -> Counter[str]:
        """Bytes by kind."""
        total: Counter[str] = Counter()
        for kind, num_bytes in self.calls:
            total[kind] += num_bytes
        return total


class _Recorder(CommDebugMode):  # type: ignore[no-untyped-call]
    """Torch's mode for watching collectives, without its tracking of modules and with bytes.

    Every collective passes here as an operator, those of DDP's C++ reducer included.
    """

    def __init__(self, counted: Collectives) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counted = counted

    @override
    def __enter__(self) -> Any:
        return super(CommDebugMode, self).__enter__()  # type: ignore[no-untyped-call]

    @override
    def __exit__(self, *exception: Any) -> None:
        super(CommDebugMode, self).__exit__(*exception)  # type: ignore[no-untyped-call]

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled: by default the compiler leaves alone whatever runs under a mode."""
        return True

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # let it turn into operators on plain tensors first
        if getattr(func, "namespace", None) in _NAMESPACES:
            self._record(func, args)
        return func(*args, **(kwargs or {}))

    def _record(self, func: Any, args: Sequence[Any]) -> None:
        kind = _KIND_OF.get(func.overloadpacket.__name__)
        if kind is None:
            return
        num_bytes = max((_size_bytes(arg) for arg in args), default=0)
        if kind in ("send", "recv") and args[-1] in EXCHANGES:
            if kind == "send":
                return
            kind, num_bytes = EXCHANGES[args[-1]], 2 * num_bytes
        self._counted.calls.append((kind, num_bytes))


def _size_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, (list, tuple)):
        return sum(map(_size_bytes, value))
    return 0


@contextmanager
def count_collectives() -> Iterator[Collectives]:
    """Count every collective this process issues inside the block, forward and backward, of DDP, FSDP2 or by hand."""
    counted = Collectives()
    with _Recorder(counted):
        yield counted
