"""Values that a user gives, within their range."""

from typing import Any


def require_at_least(least: float, **values: float | None) -> None:
    """Raise ValueError for a value below ``least``; None stands for one that was not given."""
    for name, value in values.items():
        if value is not None and (isinstance(value, bool) or not value >= least):
            raise ValueError(f"{name}={value!r} must be {least} or more.")


def require_choices(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ValueError for a value that is not among ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not known. Use one of {', '.join(choices)}.")


def require_share(name: str, value: float | None) -> None:
    """Raise ValueError unless 0 < value < 1; None stands for one that was not given."""
    if value is not None and not 0 < value < 1:
        raise ValueError(f"{name}={value!r} is a share: it must be above 0 and below 1.")
