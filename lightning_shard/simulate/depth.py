"""From runs of a few blocks to a model of many, where memory is exactly linear in their number."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_shard.simulate.allocator import LARGE_SEGMENT_BYTES
from lightning_shard.simulate.result import Collective, MomentPeak

_BLOCK = re.compile(r"(?P<what>.* of block )(?P<index>-?\d+)$")
RESERVED_TOLERANCE = 0.01
"""Reserved bytes come in segments, so they are on a line only nearly: within this share and one segment."""

ROUNDING_BYTES = 4096
"""What rounding every bucket up to 512 bytes can add."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """What a run of some number of blocks counted."""

    num_blocks: int
    moments: tuple[MomentPeak, ...]
    collectives: tuple[Collective, ...]
    reserved_bytes: int
    guessed_branches: int


class NotLinearError(Exception):
    """The runs do not lie on a line, so nothing can be said about other depths."""


def extrapolate(runs: Sequence[Counted], num_blocks: int) -> Counted:
    """What ``num_blocks`` blocks would count, from runs of three depths.

    Each moment is taken by itself: a step's peak moves from one moment to another as blocks are added, and
    only within a moment is it linear. At a block's own moments memory is linear in its place as well, so
    between two ends it never exceeds them: the two blocks at either end stand for all.

    Raises:
        NotLinearError: when the middle run is not on the line through the other two.
    """
    short_run, middle_run, long_run = runs
    line = _Line(short_run.num_blocks, middle_run.num_blocks, long_run.num_blocks, num_blocks)
    short, middle, long = (_by_place(run) for run in runs)
    if not short.keys() == middle.keys() == long.keys():
        raise NotLinearError("the runs went through different moments")
    return Counted(
        num_blocks=num_blocks,
        moments=tuple(_moment(line, name, short[name], middle[name], long[name]) for name in short),
        collectives=_collectives(line, runs),
        reserved_bytes=line(
            *(run.reserved_bytes for run in runs), tolerance=RESERVED_TOLERANCE, slack_bytes=LARGE_SEGMENT_BYTES
        ),
        guessed_branches=line(*(run.guessed_branches for run in runs)),
    )


class _Line:
    """The line through two depths, checked at a third between them."""

    def __init__(self, short: int, middle: int, long: int, wanted: int) -> None:
        self._middle = (middle - short) / (long - short)
        self._wanted = (wanted - short) / (long - short)
        self.wanted = wanted

    def __call__(
        self, short: int, middle: int, long: int, *, tolerance: float = 1e-5, slack_bytes: int = ROUNDING_BYTES
    ) -> int:
        """The value at the wanted depth."""
        expected = short + (long - short) * self._middle
        if abs(expected - middle) > tolerance * middle + slack_bytes:
            raise NotLinearError(f"{middle} bytes where {expected:.0f} were expected")
        return round(short + (long - short) * self._wanted)


def _by_place(run: Counted) -> dict[str, MomentPeak]:
    """A run's moments, the last two blocks counted from the end; blocks between the ends are left out."""
    result = {}
    for peak in run.moments:
        found = _BLOCK.match(peak.name)
        if found is None:
            result[peak.name] = peak
            continue
        index = int(found["index"])
        if index < 2:
            result[peak.name] = peak
        elif index >= run.num_blocks - 2:
            result[f"{found['what']}{index - run.num_blocks}"] = peak
    return result


def _moment(line: _Line, name: str, *peaks: MomentPeak) -> MomentPeak:
    found = _BLOCK.match(name)
    if found is not None and int(found["index"]) < 0:
        name = f"{found['what']}{line.wanted + int(found['index'])}"
    allocated = line(*(peak.allocated_bytes for peak in peaks))
    kinds = sorted({kind for peak in peaks for kind in peak.kinds})
    sizes = {kind: line(*(peak.kinds.get(kind, 0) for peak in peaks)) for kind in kinds}
    return MomentPeak(name=name, allocated_bytes=allocated, kinds=sizes)


def _collectives(line: _Line, runs: Sequence[Counted]) -> tuple[Collective, ...]:
    by_kind = [{each.kind: each for each in run.collectives} for run in runs]
    return tuple(
        Collective(
            kind=kind,
            count=line(*(run[kind].count for run in by_kind)),
            num_bytes=line(*(run[kind].num_bytes for run in by_kind)),
        )
        for kind in by_kind[0]
    )
