"""Replace an attribute for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    """``owner.name`` is ``value`` inside; afterwards all is as before, the way it was stored included."""
    stored = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if stored is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, stored)
