"""Sizes as people write them, read into bytes."""

import re

_UNITS = {
    "": 1, "B": 1,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


ALLOCATION_BYTES = 512
"""The CUDA allocator hands out multiples of this and counts them so (c10/cuda/CUDACachingAllocator, ``kMinBlockSize``)."""


def allocated_bytes(size: int) -> int:
    """What a tensor of ``size`` bytes takes: it shows where tensors are small, as norms and adapters are."""
    return -(-size // ALLOCATION_BYTES) * ALLOCATION_BYTES


def parse_bytes(text: str | int) -> int:
    """Bytes of a size such as ``80GiB`` (2**30), ``24GB`` (10**9) or a plain number of bytes.

    Raises:
        ValueError: when the text is not a positive number with one of these units.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = _UNITS.get(match.group(2).upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"size {text!r} is not understood. Write a number and a unit: 80GiB, 24GB, 512MiB or bytes.")
    size = float(match.group(1)) * unit
    if not 1 <= size < 2**63:
        raise ValueError(f"size {text!r} must be above 0 bytes and below {2**63}.")
    return int(size)


def format_bytes(size: int) -> str:
    """A size for people, in GiB where that shows something, else in the unit that does."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= factor / 10:
            return f"{size / factor:.2f} {unit}"
    return f"{size} B"


def require_count(name: str, value: object, *, minimum: int = 1) -> None:
    """Raise unless the value is a whole number and not below the minimum.

    Raises:
        ValueError: naming the field, the value and the rule.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{name}={value!r} must be a whole number, {minimum} or more.")


def require_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise unless the value is one of the choices.

    Raises:
        ValueError: listing the choices.
    """
    if value not in choices:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")
