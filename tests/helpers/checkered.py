"""Half of all combinations by default, the other half among the slow tests."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def checkered(**axes: Iterable[Any]) -> tuple[str, list[Any]]:
    """Arguments for ``parametrize``: every other combination, as on a chess board, is marked slow.

    Of three axes and more, any two values of different axes meet in a combination that is not.
    """
    rows = [list(enumerate(values)) for values in axes.values()]
    return ",".join(axes), [_param(combination) for combination in itertools.product(*rows)]


def _param(combination: tuple[tuple[int, Any], ...]) -> Any:
    slow = sum(index for index, _ in combination) % 2
    values = [value for _, value in combination]
    names = [getattr(value, "__name__", str(value)) for value in values]
    return pytest.param(*values, id="-".join(names), marks=pytest.mark.slow if slow else ())
