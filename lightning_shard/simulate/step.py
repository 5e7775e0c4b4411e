"""One optimizer step of a laid-out module, as the strategies run it."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_shard.parallelize import Parallelized, bucket_bytes
from lightning_shard.plans import MIB, Plan
from lightning_shard.simulate import moments
from lightning_shard.simulate.autocast import autocast_as_cuda
from lightning_shard.simulate.tracker import Tracker
from lightning_shard.specs import Precision

ZeroGrad = Literal["before_backward", "after_step"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A laid-out module and what its step needs."""

    layout: Parallelized
    wrapped: nn.Module
    """DDP's wrapper around the root, or the root itself."""
    optimizers: list[Optimizer]
    accumulate: int
    batch: Callable[[], Any]
    zero_grad: ZeroGrad
    """Lightning clears gradients before backward, a plain loop after the step."""

    @property
    def root(self) -> Any:
        """The user's module."""
        return self.layout.module


def wrap(layout: Parallelized, tracker: Tracker, *, fake: bool) -> nn.Module:
    """DDP around a replicated root that asks for it, with the options the strategy gives it."""
    root, plan = layout.module, layout.plan
    if layout.sharded or plan.world_size == 1 or plan.flat_gradients:
        return root
    with tracker.during("ddp_buckets"):
        ddp = DistributedDataParallel(
            root,
            init_sync=False,
            broadcast_buffers=False,
            gradient_as_bucket_view=True,
            bucket_cap_mb=bucket_bytes(root, plan) / MIB,
            static_graph=plan.static_graph,
        )
    if fake:
        ddp.register_comm_hook(None, _reduced_at_once(tracker))
    return ddp


def run_step(job: Job, tracker: Tracker) -> None:
    """All micro-batches and the optimizer's step. Of many micro-batches the first and the last are run."""
    num_run = min(job.accumulate, 2)
    for index in range(num_run):
        first, last = index == 0, index == num_run - 1
        before = len(tracker.collectives)
        with nullcontext() if last else _between_micro_batches(job):
            _micro_batch(job, tracker, clear=first)
        if not last:  # the others up to the last one send what this one did
            tracker.collectives += tracker.collectives[before:] * (job.accumulate - 2)
    tracker.enter_moment(moments.OPTIMIZER)
    on_host = job.layout.plan.offload != "none"
    with tracker.paused() if on_host else nullcontext(), tracker.during("optimizer_step"):
        for optimizer in job.optimizers:
            optimizer.step()
    if job.zero_grad == "after_step":
        _clear(job)


def _micro_batch(job: Job, tracker: Tracker, *, clear: bool) -> None:
    tracker.enter_moment(moments.BEFORE_BLOCKS)
    with tracker.during("batch"):
        batch = job.batch()
    with ExitStack() as stack:
        stack.enter_context(job.layout.root_cast())
        stack.enter_context(_mixed(job.layout.precision, job.layout.plan))
        loss = _loss_of(_call(job, batch))
    loss = loss / job.accumulate
    if clear:
        _clear(job)
    if job.layout.replicated is not None:
        job.layout.replicated.before_backward()
    tracker.enter_moment(moments.BACKWARD_START)
    loss.backward()  # type: ignore[no-untyped-call]


def _call(job: Job, batch: Any) -> Any:
    """``training_step``, through DDP's forward where there is DDP, as Lightning redirects it."""
    root = job.root
    if not isinstance(job.wrapped, DistributedDataParallel):
        return root.training_step(batch, 0)
    original = root.forward

    def once(*args: Any, **kwargs: Any) -> Any:
        root.forward = original
        return root.training_step(*args, **kwargs)

    root.forward = once
    return job.wrapped(batch, 0)


def _loss_of(output: Any) -> Tensor:
    loss = output["loss"] if isinstance(output, dict) else output
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"training_step returned {type(output).__name__}: a simulated step needs a loss tensor, or a dict with one "
            "under 'loss'. Manual optimization cannot be simulated."
        )
    return loss


def _clear(job: Job) -> None:
    for optimizer in job.optimizers:
        optimizer.zero_grad(set_to_none=True)


def _mixed(precision: Precision, plan: Plan) -> AbstractContextManager[Any]:
    """Autocast for ``-mixed`` on a replicated plan; FSDP's policy casts under a sharded one."""
    mixed = precision.compute_dtype is not None and precision.frozen_dtype is None
    if not mixed or plan.strategy == "fsdp2":
        return nullcontext()
    assert precision.compute_dtype is not None
    return autocast_as_cuda(getattr(torch, precision.compute_dtype))


@contextmanager
def _between_micro_batches(job: Job) -> Iterator[None]:
    if job.layout.sharded or job.layout.replicated is not None:
        with job.layout.between_micro_batches():
            yield
    elif isinstance(job.wrapped, DistributedDataParallel):
        with job.wrapped.no_sync():
            yield
    else:
        yield


def _reduced_at_once(tracker: Tracker) -> Any:
    """A hook in place of DDP's own all-reduce, whose result the fake group never delivers."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations and wants its own types
        buffer = bucket.buffer()
        tracker.collectives.append(("all_reduce", buffer.numel() * buffer.element_size()))
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    return hook
