import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _environment_as_before() -> Iterator[None]:
    """Lightning leaves LOCAL_RANK and others behind, and a command started later would wait for ranks that never come."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
