"""Which operators are collectives, and what they move."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor

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


def collective_kind(func: Any) -> str | None:
    """The kind of collective an operator carries out; None for any other operator."""
    if func.namespace not in _NAMESPACES:
        return None
    name = func.overloadpacket.__name__
    return next((kind for part, kind in _KINDS if part in name), None)


def collective_bytes(args: Any) -> int:
    """Bytes of the largest argument: the whole, gathered side."""
    return max((_size_bytes(arg) for arg in args), default=0)


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
