"""Shards of hosts on several nodes: what the network carries while the cores compute, unit by unit.

Cores do their part of every transfer themselves (packing, and the bytes at the rate of the link inside a host); the rest
of it passes while they compute, as far as the plan gathers ahead and reductions run beside backward
(:mod:`lightning_shard.parallelize.prefetch`). A unit's gather has the time of the unit before it, its reduction that of
the unit after it; the first gather and the last reduction stand alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_shard.memory import Situation
from lightning_shard.memory.groups import Group
from lightning_shard.timing.links import Ring, all_reduce_s, collective_s


@dataclass(frozen=True, slots=True)
class _Unit:
    """Of one repetition of a group: its part of a pass's compute, and seconds of cores and of network."""

    share: float
    gathers: bool
    gathers_again: bool
    reduces: bool
    gather_s: tuple[float, float]
    reduce_s: tuple[float, float]


def passes_s(s: Situation, ring: Ring, forward_s: float, backward_s: float) -> float:
    """Seconds of all forwards and backwards of an optimizer step, without what is reduced once outside the groups."""
    units, total = _units(s, ring), 0.0
    keeps, last = s.plan.reshard_after_forward is False, s.train.accumulate - 1
    for index in range(s.train.accumulate):
        gathering = index == 0 or not keeps
        reducing = index == last or not s.plan.defer_gradient_sync
        total += _forward_s(units, forward_s, gathering=gathering, ahead=s.plan.prefetch > 0)
        total += _backward_s(s, units[::-1], backward_s, gathering=not keeps, reducing=reducing)
    return total


def _forward_s(units: Sequence[_Unit], forward_s: float, *, gathering: bool, ahead: bool) -> float:
    cores = [forward_s * unit.share + unit.gather_s[0] * (gathering and unit.gathers) for unit in units]
    waits = [unit.gather_s[1] * (gathering and unit.gathers) for unit in units]
    return _beside(cores, [*waits[1:], 0.0], overlaps=ahead) + waits[0]


def _backward_s(s: Situation, units: Sequence[_Unit], backward_s: float, *, gathering: bool, reducing: bool) -> float:
    gathers = [gathering and unit.gathers_again for unit in units]
    reduces = [reducing and unit.reduces for unit in units]
    cores = [
        backward_s * unit.share + unit.gather_s[0] * gathered + unit.reduce_s[0] * reduced
        for unit, gathered, reduced in zip(units, gathers, reduces, strict=True)
    ]
    gather_waits = [unit.gather_s[1] * gathered for unit, gathered in zip(units, gathers, strict=True)]
    reduce_waits = [unit.reduce_s[1] * reduced for unit, reduced in zip(units, reduces, strict=True)]
    beside = s.plan.dp_replicate == 1 and s.plan.offload == "none" and s.plan.tp == 1
    if not (beside and s.plan.prefetch):
        return (
            _beside(cores, [*gather_waits[1:], 0.0], overlaps=s.plan.prefetch > 0) + gather_waits[0] + sum(reduce_waits)
        )
    waits = [ahead + behind for ahead, behind in zip([*gather_waits[1:], 0.0], [0.0, *reduce_waits[:-1]], strict=True)]
    return gather_waits[0] + _beside(cores, waits, overlaps=True) + reduce_waits[-1]


def _beside(cores: Sequence[float], waits: Sequence[float], *, overlaps: bool) -> float:
    return sum(map(max if overlaps else _add, cores, waits))


def _add(first: float, second: float) -> float:
    return first + second


def _units(s: Situation, ring: Ring) -> list[_Unit]:
    """In the order in which they run: the embedding computes nothing worth counting."""
    computing = sum(group.count * group.stored_bytes for group in s.groups if group.kind != "embedding")
    keeps = s.plan.reshard_after_forward is False
    units = []
    for group in s.groups:
        reduced = s.reduce_bytes * group.whole_numel
        unit = _Unit(
            share=0.0 if group.kind == "embedding" else group.stored_bytes / max(1, computing),
            gathers=group.gathered_bytes > 0,
            gathers_again=_gathers_again(group, keeps=keeps),
            reduces=reduced > 0,
            gather_s=_parts_s(
                s, ring, group.gathered_bytes, collective_s(s.cluster, ring, group.gathered_bytes, messages=1)
            ),
            reduce_s=_parts_s(
                s,
                ring,
                reduced,
                (collective_s if ring.size == 2 else all_reduce_s)(s.cluster, ring, reduced, messages=1),
            ),
        )
        units += [unit] * group.count
    return units


def _gathers_again(group: Group, *, keeps: bool) -> bool:
    return group.kind == "block" and not keeps and not group.resident and group.gathered_bytes > 0


def _parts_s(s: Situation, ring: Ring, size_bytes: int, seconds: float) -> tuple[float, float]:
    """Of a transfer: what the cores do, and for how much longer the network is at it."""
    carried_s = (ring.size - 1) / ring.size * size_bytes / s.cluster.intra_link.bytes_per_s
    return s.cluster.device.host_work_s + carried_s, max(0.0, seconds - carried_s)
