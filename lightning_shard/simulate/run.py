"""Simulate a plan: the whole of it, from a model to a report."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

import lightning_shard.parallelize as engine
from lightning_shard._compat import fake_tensor_mode
from lightning_shard.parallelize import Parallelized, parallelize
from lightning_shard.plans import Plan
from lightning_shard.simulate.build import to_fake
from lightning_shard.simulate.cuda_like import allocate_as_cuda
from lightning_shard.simulate.fsdp import fsdp_kinds
from lightning_shard.simulate.moments import watch_blocks
from lightning_shard.simulate.optimizers import make_optimizer, warm_up
from lightning_shard.simulate.patches import patched
from lightning_shard.simulate.step import Job, ZeroGrad, run_step, wrap
from lightning_shard.simulate.tracker import Tracker
from lightning_shard.simulate.world import fake_world
from lightning_shard.specs import TrainSpec

log = logging.getLogger(__name__)


def track_step(
    root: nn.Module, train: TrainSpec, plan: Plan, batch: Callable[[], Any], *, zero_grad: ZeroGrad
) -> Tracker:
    """Run one step of ``root`` (on meta) under ``plan`` without memory; the tracker knows what it would have taken."""
    tracker = Tracker()
    with ExitStack() as stack:
        mesh = stack.enter_context(fake_world(plan))
        stack.enter_context(fake_tensor_mode())
        stack.enter_context(allocate_as_cuda())
        stack.enter_context(_one_process_for_all(root))
        to_fake(root)
        layout = parallelize(
            root, plan, precision=train.precision_row, device=torch.device("cpu"), mesh=mesh
        )
        count_step(layout, train, batch, tracker, zero_grad=zero_grad, fake=True)
    return tracker


def count_step(
    layout: Parallelized,
    train: TrainSpec,
    batch: Callable[[], Any],
    tracker: Tracker,
    *,
    zero_grad: ZeroGrad,
    fake: bool,
) -> None:
    """Count one step of a laid-out module, on real or fake tensors alike."""
    root = layout.module
    for parameter in root.parameters():
        tracker.adopt(parameter, "trained_weights" if parameter.requires_grad else "frozen_weights")
    for buffer in root.buffers():
        tracker.adopt(buffer, "buffers")
    with tracker, fsdp_kinds(tracker):
        wrapped = wrap(layout, tracker, fake=fake)
        with tracker.paused():
            optimizers = [make_optimizer(root.parameters(), train)]
            keep = zero_grad == "before_backward" and wrapped is root
            warm_up(optimizers, tracker, keep_gradients=keep)
        handles = [*_watch_gradients(root, tracker), *watch_blocks(layout.units.blocks, tracker)]
        job = Job(
            layout=layout, wrapped=wrapped, optimizers=optimizers, train=train, batch=batch, zero_grad=zero_grad
        )
        run_step(job, tracker)
    for handle in handles:
        handle.remove()


def _watch_gradients(root: nn.Module, tracker: Tracker) -> Iterator[Any]:
    def made(parameter: nn.Parameter) -> None:
        if parameter.grad is not None and tracker.kind_of(parameter.grad) != "ddp_buckets":
            tracker.adopt(parameter.grad, "gradients")

    for parameter in root.parameters():
        if parameter.requires_grad:
            yield parameter.register_post_accumulate_grad_hook(made)  # type: ignore[no-untyped-call]


@contextmanager
def _one_process_for_all(root: nn.Module) -> Iterator[None]:
    """The engine, without what needs real ranks and real memory: comparing starts, and moving to the device."""
    with patched(engine, "agree_on_start", lambda module, device: 0), patched(root, "to", lambda device: root):
        yield
