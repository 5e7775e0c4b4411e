"""Tell the tracker which moment of the step it is: the blocks are the clock."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from lightning_shard._compat import in_backward
from lightning_shard.simulate.result import MomentPeak
from lightning_shard.simulate.tracker import SETUP, Tracker

BEFORE_BLOCKS = "before the blocks"
FORWARD_END = "end of forward"
BACKWARD_START = "start of backward"
BACKWARD_END = "end of backward"
OPTIMIZER = "optimizer step"


def forward_of(block: int) -> str:
    """Name of the moment of a block's forward, from its start to the next block's."""
    return f"forward of block {block}"


def backward_of(block: int) -> str:
    """Name of the moment of a block's backward, from the gradient of its output to that of the block before."""
    return f"backward of block {block}"


def watch_blocks(blocks: list[tuple[str, nn.Module]], tracker: Tracker) -> list[Any]:
    """Install hooks that move the tracker's moment on; returns their handles."""
    handles = []
    last = len(blocks) - 1
    for index, (_, block) in enumerate(blocks):
        # In front of the engine's own hooks, so that what a block gathers belongs to its own moment.
        handles.append(block.register_forward_pre_hook(_starts(tracker, index), prepend=True, with_kwargs=True))
        handles.append(block.register_forward_hook(_ends(tracker, index, is_last=index == last), prepend=True))
    return handles


def _starts(tracker: Tracker, index: int) -> Any:
    def starts(block: nn.Module, args: Any, kwargs: Any) -> None:
        if in_backward():
            return  # recomputed
        tracker.enter_moment(forward_of(index))
        if index == 0:
            _on_gradient([*args, *kwargs.values()], tracker, BACKWARD_END)

    return starts


def _ends(tracker: Tracker, index: int, *, is_last: bool) -> Any:
    def ends(block: nn.Module, args: Any, output: Any) -> None:
        if in_backward():
            return
        if is_last:
            tracker.enter_moment(FORWARD_END)
        _on_gradient([output] if isinstance(output, Tensor) else output, tracker, backward_of(index))

    return ends


def _on_gradient(values: Any, tracker: Tracker, moment: str) -> None:
    for value in values if isinstance(values, (list, tuple)) else ():
        if isinstance(value, Tensor) and value.requires_grad:
            value.register_hook(lambda _: tracker.enter_moment(moment))  # type: ignore[no-untyped-call]
            return


def in_order(peaks: Iterable[MomentPeak]) -> tuple[MomentPeak, ...]:
    """The moments of a step in the order in which it went through them; what came before the step is left out."""
    return tuple(peak for peak in peaks if peak.name != SETUP)
