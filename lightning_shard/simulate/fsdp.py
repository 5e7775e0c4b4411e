"""Tell FSDP2's memory by what it is for, and leave its shape arithmetic out."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from lightning_shard._compat import fsdp_transfers, sharding_arithmetic
from lightning_shard.simulate.patches import patched
from lightning_shard.simulate.tracker import Tracker

_KINDS = {
    "gather": "gather_buffers",
    "copy_out": "gather_buffers",
    "gathered": "gathered_weights",
    "reduce": "reduce_buffers",
    "defer": "gradients",
}


@contextmanager
def fsdp_kinds(tracker: Tracker, *, offloaded: bool) -> Iterator[None]:
    """Inside, what FSDP2 gathers and reduces has kinds of its own; reduced gradients that go to the host are let go."""
    with ExitStack() as stack:
        for what, (owner, name) in fsdp_transfers().items():
            tagged = _within(getattr(owner, name), tracker, _KINDS[what])
            if what == "reduce":
                tagged = _then_adopt_reduced(tagged, tracker.ignore if offloaded else tracker.adopt_gradient)
            elif what == "defer":
                tagged = _then_adopt_deferred(tagged, tracker)
            stack.enter_context(patched(owner, name, tagged))
        owner, name = sharding_arithmetic()
        stack.enter_context(patched(owner, name, _uncounted(getattr(owner, name), tracker)))
        yield


def _within(function: Callable[..., Any], tracker: Tracker, kind: str) -> Callable[..., Any]:
    def inside(*args: Any, **kwargs: Any) -> Any:
        with tracker.during(kind):
            return function(*args, **kwargs)

    return inside


def _uncounted(function: Callable[..., Any], tracker: Tracker) -> Callable[..., Any]:
    def inside(*args: Any, **kwargs: Any) -> Any:
        with tracker.paused():
            return function(*args, **kwargs)

    return inside


def _then_adopt_reduced(reduce: Callable[..., Any], adopt: Callable[[Tensor], None]) -> Callable[..., Any]:
    """What a reduction leaves on the sharded parameters are gradients."""

    def inside(fsdp_params: Any, *args: Any, **kwargs: Any) -> Any:
        result = reduce(fsdp_params, *args, **kwargs)
        for each in fsdp_params:
            if each.sharded_param.grad is not None:
                adopt(each.sharded_param.grad)
        return result

    return inside


def _then_adopt_deferred(keep: Callable[..., Any], tracker: Tracker) -> Callable[..., Any]:
    """A whole gradient that waits for the last micro-batch is a gradient."""

    def inside(fsdp_param: Any) -> Any:
        result = keep(fsdp_param)
        waiting = fsdp_param.unsharded_accumulated_grad
        if waiting is None:
            waiting = fsdp_param.unsharded_param.grad
        if waiting is not None:
            tracker.adopt_gradient(waiting)
        return result

    return inside
