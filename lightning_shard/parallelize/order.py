"""Every rank gathers the same units in the same order, or all ranks are told which one did not.

Collectives pair up by position: a block that only some ranks run would be gathered together with another
block of the others, which gives wrong numbers or a hang. Each rank therefore follows the order that the ranks
last agreed on, which costs nothing; at the end of a forward one small message on the host says whether all
did. A rank about to leave that order first takes part in the gathers its peers may be waiting for, so that
they too arrive at the question.
"""

import hashlib
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_shard._compat import in_backward, outside_modes
from lightning_shard._compat.groups import new_group
from lightning_shard.parallelize.together import gather

END = -1
"""Stands for the end of a forward in an order of units."""


def fingerprint(order: list[int]) -> int:
    """A number below 2**56 that tells orders apart."""
    text = ",".join(map(str, order))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


class HostChannel:
    """Small agreements between all ranks, on the host and apart from the data's own groups."""

    def __init__(self) -> None:
        self._group: Any = None

    def all_reduce(self, values: list[int], operation: Any) -> list[int]:
        """Each of ``values`` (64-bit integers) reduced over all ranks. Not counted as traffic of the step."""
        return outside_modes(self._all_reduce)(values, operation)  # type: ignore[no-any-return]

    def all_gather(self, value: Any) -> list[Any]:
        """The value of every rank, by rank."""
        return gather(value, self._gloo())

    def _all_reduce(self, values: list[int], operation: Any) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(tensor, op=operation, group=self._gloo())
        return tensor.tolist()

    def _gloo(self) -> Any:
        if self._group is None:
            self._group = new_group("gloo")
        return self._group


class GatherOrder:
    """Watches in which order the units below ``root`` run.

    Args:
        root: the sharded root; its own group is gathered by every step and is not watched.
        channel: where the ranks agree.
        prefetched: the units gathered ahead when a unit runs, beyond what FSDP does by itself.
    """

    def __init__(self, root: nn.Module, channel: HostChannel, prefetched: dict[nn.Module, list[FSDPModule]]) -> None:
        self._channel = channel
        self._prefetched = prefetched
        self._names: list[str] = []
        self._units: list[Any] = []
        self._known: dict[str, list[int]] = {}
        self._kind: str | None = None
        self._segment = 0
        self._seen: list[int] = []
        self._following: list[int] | None = None
        self._hooks: list[Any] = []
        for name, module in root.named_modules():
            if name and isinstance(module, FSDPModule):
                self._watch(name, module)

    @contextmanager
    def watching(self, kind: str) -> Generator[None, None, None]:
        """A forward, started and ended by all ranks; ``kind`` tells steps that run in different orders apart."""
        self._segment = 0
        self._begin(kind)
        try:
            yield
            self._end()
        finally:
            self._kind = None

    def before_backward(self) -> None:
        """A backward inside a forward (manual optimization): what ran so far must agree before gradients travel."""
        if self._kind is not None:
            kind = self._kind
            self._end()
            self._segment += 1
            self._begin(kind)

    def _watch(self, name: str, unit: Any) -> None:
        index = len(self._units)
        self._names.append(name)
        self._units.append(unit)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def before(*_: Any) -> None:
            if self._kind is not None and not in_backward():  # recomputation repeats what was agreed on
                self._next(index)

        self._hooks.append(unit.register_forward_pre_hook(before, prepend=True))

    def remove(self) -> None:
        """Watch no more."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, kind: str) -> None:
        self._kind = kind
        self._seen = []
        self._following = self._known.get(f"{kind}/{self._segment}")

    def _end(self) -> None:
        if self._following is not None and len(self._seen) < len(self._following):
            self._gather_rest()
        self._agree(END)
        self._known[f"{self._kind}/{self._segment}"] = self._seen

    def _next(self, index: int) -> None:
        if self._following is not None:
            position = len(self._seen)
            if position < len(self._following) and self._following[position] == index:
                self._seen.append(index)
                return
            self._gather_rest()
        self._agree(index)
        self._seen.append(index)

    def _gather_rest(self) -> None:
        """Take part in every gather that peers which follow the agreed order do before they ask."""
        assert self._following is not None
        rest = self._following[len(self._seen) :]
        self._following = None
        for index in rest:
            unit = self._units[index]
            gathered: Iterable[FSDPModule] = (unit, *self._prefetched.get(unit, ()))
            for each in gathered:
                each.unshard()
            unit.reshard()

    def _agree(self, index: int) -> None:
        """Raise on all ranks unless all of them ran the same units and go on with the same one."""
        mine = fingerprint([*self._seen, index])
        highest, lowest = self._channel.all_reduce([mine, -mine], dist.ReduceOp.MAX)
        if highest == -lowest:
            return
        self._kind = None
        raise RuntimeError(self._describe(self._channel.all_gather([*self._seen, index])))

    def _describe(self, orders: list[list[int]]) -> str:
        other = next(rank for rank, order in enumerate(orders) if order != orders[0])
        position = next(i for i, (a, b) in enumerate(zip(orders[0], orders[other], strict=False)) if a != b)
        told = [self._tell(orders[rank][position]) for rank in (0, other)]
        return (
            f"The ranks ran different blocks: after {position} of them rank 0 {told[0]} and rank {other} {told[1]}. A "
            "sharded block is gathered from all ranks, so all must run the same ones in the same order. Run the block on "
            "every rank (times zero where it is not wanted), draw random choices such as layer drop alike on all ranks, "
            "give generate() synced_gpus=True, or keep a copy on every rank: TunedDDPStrategy(find_unused_parameters=True)."
        )

    def _tell(self, index: int) -> str:
        return "had finished its forward" if index == END else f"ran {self._names[index]}"
