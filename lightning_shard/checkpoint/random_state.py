"""Random state of one rank, as tensors and plain values that load without unpickling code."""

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def random_state(device: torch.device | None = None) -> dict[str, Any]:
    """The state of Python's, NumPy's, torch's and the device's generators."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(numbers), gauss], "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [kind, torch.tensor(keys.tolist(), dtype=torch.int64), position, has_gauss, cached]
    if device is not None and device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device | None = None) -> None:
    """Put the generators where :func:`random_state` found them."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        kind, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((kind, keys.numpy().astype("uint32"), position, has_gauss, cached))
    if "cuda" in state and device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def random_state_of(state: dict[str, Any]) -> Iterator[None]:
    """Inside, random numbers continue from ``state``; afterwards the generators are where they were."""
    before = random_state()
    set_random_state(state)
    try:
        yield
    finally:
        set_random_state(before)


def state_for_rank(states: list[dict[str, Any]], rank: int, num_ranks: int) -> dict[str, Any]:
    """The state that data-parallel rank ``rank`` of ``num_ranks`` goes on with.

    With as many ranks as there were, each goes on with its own. With another number every rank starts a sequence of its
    own, drawn from the first one's state: ranks must not share one, and the same resume must give the same numbers.
    """
    if len(states) == num_ranks:
        return states[rank]
    with random_state_of(states[0]):
        seed = int(torch.randint(2**31, ())) + rank
        torch.manual_seed(seed)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        return random_state()
