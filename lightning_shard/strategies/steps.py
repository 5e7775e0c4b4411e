"""The steps of a run: what happens around forward, backward and the optimizer under every layout."""

from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard._compat import fsdp_watch_loss
from lightning_shard._compat.sharded import fsdp_take_off
from lightning_shard.parallelize.buffers import SharedBuffers
from lightning_shard.parallelize.gradients import ShardedGradients
from lightning_shard.parallelize.order import GatherOrder, HostChannel
from lightning_shard.strategies.checks import require_manual_backward, require_used
from lightning_shard.strategies.state import PortableStateStrategy


class StepStrategy(PortableStateStrategy):
    """Runs Lightning's steps on a module that a Plan laid out."""

    _synced_once = False
    """Whether a backward of this fit went through the strategy."""
    _accumulating = False
    """Whether the backward under way is not the last before the optimizer steps."""
    _order: GatherOrder | None = None
    _gradients: ShardedGradients | None = None
    _buffers: SharedBuffers | None = None
    _share_next = True
    """Whether the next forward starts from rank 0's buffers: the first after every reduction does, as under DDP."""

    def _watch_ranks(self) -> None:
        """Watch over what the ranks of a sharded module must do alike; once per module."""
        root, layout = self._root, self._layout
        if layout is None or not layout.sharded or self.world_size == 1:
            self._order = self._gradients = self._buffers = None
            return
        if layout.watch is None:
            channel = HostChannel()
            order = GatherOrder(root, channel, layout.ahead)
            layout.hooks.append(order)
            layout.watch = (order, ShardedGradients(root, channel), SharedBuffers(root))
        self._order, self._gradients, self._buffers = layout.watch
        self._share_next = True

    def let_go(self) -> None:
        """Forget a forward or backward that an error broke off, and hold no process group; no collective.

        Afterwards the module is as it lies in memory, and needs a new layout.
        """
        assert self._layout is not None
        self._layout.undo()
        fsdp_take_off(self._root)
        self._layout.replicated = self._layout.watch = self._order = self._gradients = self._buffers = None
        self.model = self._root
        self.forget_groups()

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._buffers and self._share_next:
            self._buffers.share()
        self._share_next = not self._accumulating
        with self._step_scope("training_step"):
            return super().training_step(*args, **kwargs)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step_scope("validation_step"):
            return super().validation_step(*args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step_scope("test_step"):
            return super().test_step(*args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._step_scope("predict_step"):
            return super().predict_step(*args, **kwargs)

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self._buffers:
            self._buffers.share()

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._rest()  # what is frozen or unfrozen from here on must be the shards

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        if self._buffers:
            self._buffers.share()

    @contextmanager
    def _step_scope(self, name: str) -> Generator[None, None, None]:
        cast = self._layout.root_cast if self._layout is not None else None
        if cast and self.sharded and isinstance(self._root, FSDPModule):
            self._root.unshard()  # what is cast below is the gathered copy
        with cast() if cast else nullcontext(), self._order.watching(name) if self._order else nullcontext():
            yield

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        super().pre_backward(closure_loss)
        if self._order is not None:
            self._order.before_backward()
        if self._gradients is not None:
            self._gradients.before_backward()
        if self._layout is not None and self._layout.replicated:
            self._layout.replicated.before_backward(closure_loss)
        if isinstance(self.model, FSDPModule) and not self._root.automatic_optimization:
            fsdp_watch_loss(self.model, closure_loss)

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        self._synced_once = True
        if self._gradients is not None:
            self._gradients.after_backward(last=not self._accumulating)
        ddp = self.model
        if (
            isinstance(ddp, DistributedDataParallel)
            and ddp.require_backward_grad_sync
            and self._root.automatic_optimization
        ):
            require_used(ddp)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if not self._root.automatic_optimization and self.world_size > 1:
            require_manual_backward(optimizer, seen=self._synced_once)
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    @override
    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._accumulating = True
        try:
            with self._without_sync():
                yield
        finally:
            self._accumulating = False

    @contextmanager
    def _without_sync(self) -> Generator[None, None, None]:
        if self._layout is not None and (self._layout.sharded or self._layout.replicated):
            with self._layout.between_micro_batches():
                yield
        elif self._must_sync_first():
            yield
        else:
            with super().block_backward_sync():
                yield

    def _must_sync_first(self) -> bool:
        # DDP with a static graph learns its buckets in the first backward, which must therefore reduce. The sum is the
        # same: the mean of this micro-batch joins the gradients that the last one averages.
        return isinstance(self.model, DistributedDataParallel) and self.model.static_graph and not self._synced_once
