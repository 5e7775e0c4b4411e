"""A part of all combinations by default, the others among the slow tests."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def checkered(one_in: int = 2, **axes: Iterable[Any]) -> tuple[str, list[Any]]:
    """Arguments for ``parametrize``: all combinations but one in so many, as on a chess board, are marked slow.

    Of three axes and more and one in two, any two values of different axes meet in a combination that is not.
    """
    rows = [list(enumerate(values)) for values in axes.values()]
    return ",".join(axes), [_param(combination, one_in) for combination in itertools.product(*rows)]


def _param(combination: tuple[tuple[int, Any], ...], one_in: int) -> Any:
    slow = sum(index for index, _ in combination) % one_in
    values = [value for _, value in combination]
    names = [getattr(value, "__name__", str(value)) for value in values]
    return pytest.param(*values, id="-".join(names), marks=pytest.mark.slow if slow else ())
