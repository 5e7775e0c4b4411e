"""Which sharded parameters have a gradient after backward: those that have one on a single process, and no others."""

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from lightning_shard._compat.sharded import fsdp_note_use, fsdp_parameters
from lightning_shard.parallelize.order import HostChannel, fingerprint


class ShardedGradients:
    """Takes back the gradients that FSDP makes where there should be none.

    A parameter frozen within a step (``toggle_optimizer``) keeps what gradient it had: the copy that was gathered
    before still trains. One that no rank used has none rather than zero: an optimizer with momentum or weight decay
    would move it.

    Args:
        root: the sharded root.
        channel: where the ranks agree on what none of them used.
    """

    def __init__(self, root: nn.Module, channel: HostChannel) -> None:
        self._all = fsdp_parameters(root)
        self._parameters: list[Any] = []
        """Those that trained at some time: only they can have a gradient."""
        self._channel = channel
        self._frozen: list[tuple[nn.Parameter, Tensor | None]] = []
        self._reduced: list[int] = []
        """Which parameters were reduced, in which order, since the last step."""
        for place, parameter in enumerate(self._all):
            fsdp_note_use(parameter, place, self._reduced)
        self.refresh()

    def refresh(self) -> None:
        """Watch what has begun to train as well."""
        seen = set(map(id, self._parameters))
        self._parameters = [p for p in self._all if p.sharded_param.requires_grad or id(p) in seen]

    def before_backward(self) -> None:
        """Note what is frozen, with the gradient it has."""
        shards = [parameter.sharded_param for parameter in self._parameters]
        self._frozen = [(shard, shard.grad) for shard in shards if not shard.requires_grad]

    def after_backward(self, *, last: bool) -> None:
        """Put gradients right; ``last``: this backward was the last of those that accumulate."""
        for shard, gradient in self._frozen:
            if shard.grad is not gradient:
                shard.grad = gradient
        self._frozen = []
        if last:
            self._drop_unused()

    def _drop_unused(self) -> None:
        unused = [int(parameter.unused and not parameter.used) for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.used = parameter.unused = False
        order = fingerprint(self._reduced)
        self._reduced.clear()
        fewest, lowest, highest = self._channel.all_reduce([sum(unused), order, -order], dist.ReduceOp.MIN)
        if lowest != -highest:
            raise RuntimeError(
                "The ranks averaged the gradients of different blocks with each other: backward ran through other blocks, or "
                "in another order, on some of them. Let every rank's loss depend on the same blocks (times zero where it is "
                "not wanted; do not detach on some ranks only), or keep a copy on every rank: "
                "TunedDDPStrategy(find_unused_parameters=True)."
            )
        if not fewest:
            return
        everywhere = self._channel.all_reduce(unused, dist.ReduceOp.MIN)
        for parameter, flag in zip(self._parameters, everywhere, strict=True):
            if flag:
                parameter.sharded_param.grad = None
