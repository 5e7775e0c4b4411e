"""Medians, and ratios of what was measured side by side."""

import statistics
from collections.abc import Sequence


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def ratio(times: Sequence[float], baseline: Sequence[float]) -> dict[str, float]:
    """The median of the ratios of neighbours, and the quarter and three-quarter points around it.

    Neighbours were measured one after the other, so that what slows the machine down slows both.
    """
    ratios = sorted(mine / theirs for mine, theirs in zip(times, baseline, strict=True))
    count = len(ratios)
    return {"ratio": median(ratios), "ratio_q1": ratios[count // 4], "ratio_q3": ratios[(3 * count) // 4]}


def spread(values: Sequence[float]) -> float:
    """Distance of the quarter points over the median: how noisy the machine was."""
    ordered = sorted(values)
    count = len(ordered)
    return (ordered[(3 * count) // 4] - ordered[count // 4]) / median(ordered)
