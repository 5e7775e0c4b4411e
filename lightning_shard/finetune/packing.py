"""Several short examples in one row, none of which sees another."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

PACKABLE_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
"""Kinds of layers that keep the examples of a row apart by their positions."""


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of the examples of each row: longest first, each into the fullest row that has room (best fit).

    Deterministic. It needs at most 11/9 of the fewest possible rows, and one more (Johnson 1974).

    Args:
        lengths: tokens of each example, none above ``capacity``.
        capacity: tokens of a row.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []
    """Tokens left and row, in ascending order."""
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect_left(room, (lengths[index], -1))
        if place == len(room):
            rows.append([])
            left, row = capacity, len(rows) - 1
        else:
            left, row = room.pop(place)
        rows[row].append(index)
        insort(room, (left - lengths[index], row))
    return [sorted(row) for row in rows]


def require_packable(model: Any) -> None:
    """Raise ValueError for a model whose layers look across the borders of packed examples.

    transformers' masks keep examples apart where positions start anew; recurrent and convolutional layers carry
    state over, and models with masks of their own do not look at positions.
    """
    import inspect
    import sys

    config = model.config.get_text_config()
    source = inspect.getsource(sys.modules[type(model.get_decoder()).__module__])
    odd = sorted(set(getattr(config, "layer_types", None) or ()) - PACKABLE_LAYERS)
    if odd or not ("create_causal_mask" in source or "create_masks_for_generate" in source):
        why = f"has layers of the kind {', '.join(odd)}" if odd else "makes its own attention mask"
        raise ValueError(
            f"packing puts several examples into one row, but {type(model).__name__} {why}, so that they would see one "
            "another. Set packing: false; group_by_length: true saves most of the padding too."
        )
