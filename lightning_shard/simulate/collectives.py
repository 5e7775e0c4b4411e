"""Which operators are collectives, and what they move."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from lightning_shard._compat.groups import EXCHANGES
from lightning_shard.simulate.result import Collective

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_KINDS = (
    ("reduce_scatter", "reduce_scatter"),
    ("allgather", "all_gather"),
    ("all_gather", "all_gather"),
    ("allreduce", "all_reduce"),
    ("all_reduce", "all_reduce"),
    ("alltoall", "all_to_all"),
    ("all_to_all", "all_to_all"),
    ("broadcast", "broadcast"),
    ("barrier", "barrier"),
)
"""Part of an operator's name, and the kind it is."""


def collective(func: Any, args: Any) -> tuple[str, int] | None:
    """The kind of collective that an operator carries out, and the bytes of its whole, gathered side; None for any other
    operator. An exchange of two ranks counts where its half is received.
    """
    if func.namespace not in _NAMESPACES:
        return None
    name, size = func.overloadpacket.__name__, max((_size_bytes(arg) for arg in args), default=0)
    if name == "recv_" and args[-1] in EXCHANGES:
        return EXCHANGES[args[-1]], 2 * size
    kind = next((kind for part, kind in _KINDS if part in name), None)
    return None if kind is None else (kind, size)


def summarise(calls: Iterable[tuple[str, int]]) -> tuple[Collective, ...]:
    """Counts and bytes by kind."""
    counts: Counter[str] = Counter()
    num_bytes: Counter[str] = Counter()
    for kind, size in calls:
        counts[kind] += 1
        num_bytes[kind] += size
    return tuple(Collective(kind=kind, count=counts[kind], num_bytes=num_bytes[kind]) for kind in sorted(counts))


def _size_bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(map(_size_bytes, value))
    return 0
