"""Run one step of a module on meta under a plan, without memory, and count it."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

import lightning_shard.parallelize as engine
from lightning_shard._compat import fake_tensor_mode
from lightning_shard._compat.lists import quick_list_layouts
from lightning_shard.parallelize import Parallelized, parallelize
from lightning_shard.plans import Plan
from lightning_shard.simulate.build import to_fake
from lightning_shard.simulate.chunks import quick_chunks
from lightning_shard.simulate.cuda_like import allocate_as_cuda
from lightning_shard.simulate.fsdp import fsdp_kinds
from lightning_shard.simulate.moments import watch_blocks
from lightning_shard.simulate.optimizers import warm_up
from lightning_shard.simulate.patches import patched
from lightning_shard.simulate.step import Job, ZeroGrad, run_step, wrap
from lightning_shard.simulate.tracker import Tracker
from lightning_shard.simulate.world import fake_world
from lightning_shard.specs import Precision


def simulate_step(
    root: nn.Module,
    plan: Plan,
    precision: Precision,
    *,
    batch: Callable[[], Any],
    optimizers: Callable[[nn.Module], list[Optimizer]],
    accumulate: int = 1,
    zero_grad: ZeroGrad = "before_backward",
) -> Tracker:
    """Count one step of ``root`` (on meta; it is used up) under ``plan``, in a process group of the plan's size.

    Args:
        root: the module, with its ``training_step``.
        plan: laid out by the product's own engine.
        precision: in which types.
        batch: makes a micro-batch, under the fake mode.
        optimizers: makes the optimizers of the laid-out root.
        accumulate: micro-batches per step.
        zero_grad: when gradients are cleared.
    """
    tracker = Tracker()
    with ExitStack() as stack:
        mesh = stack.enter_context(fake_world(plan))
        stack.enter_context(fake_tensor_mode())
        stack.enter_context(allocate_as_cuda())
        stack.enter_context(quick_chunks())
        for owner, name, quicker in quick_list_layouts():
            stack.enter_context(patched(owner, name, quicker))
        stack.enter_context(_one_process_for_all(root))
        to_fake(root)
        layout = parallelize(root, plan, precision=precision, device=torch.device("cpu"), mesh=mesh)
        count_step(
            layout,
            tracker,
            batch=batch,
            optimizers=optimizers,
            accumulate=accumulate,
            zero_grad=zero_grad,
            fake=True,
        )
    return tracker


def count_step(
    layout: Parallelized,
    tracker: Tracker,
    *,
    batch: Callable[[], Any],
    optimizers: Callable[[nn.Module], list[Optimizer]],
    accumulate: int,
    zero_grad: ZeroGrad,
    fake: bool,
) -> None:
    """Count one step of a laid-out module, on real or fake tensors alike."""
    root = layout.module
    offloaded = layout.plan.offload == "all"
    _adopt_tensors(root, tracker, offloaded=offloaded)
    for buffer in layout.replicated.buffers if layout.replicated is not None else ():
        tracker.adopt(buffer, "flat_gradients")
    with tracker, fsdp_kinds(tracker, offloaded=offloaded):
        wrapped = wrap(layout, tracker, fake=fake)
        job = Job(
            layout=layout,
            wrapped=wrapped,
            optimizers=optimizers(root),
            accumulate=accumulate,
            batch=batch,
            zero_grad=zero_grad,
        )
        with tracker.paused():
            if layout.replicated is not None:
                layout.replicated.before_backward()
            keep = zero_grad == "before_backward" and wrapped is root
            warm_up(job.optimizers, tracker, keep_gradients=keep, offload=layout.plan.offload)
        handles = [*_watch_gradients(root, tracker), *watch_blocks(layout.units.blocks, tracker)]
        run_step(job, tracker)
    for handle in handles:
        handle.remove()


def _adopt_tensors(root: nn.Module, tracker: Tracker, *, offloaded: bool) -> None:
    for parameter in root.parameters():
        if offloaded and isinstance(parameter, DTensor):
            tracker.ignore(parameter)
        else:
            tracker.adopt(parameter, "trained_weights" if parameter.requires_grad else "frozen_weights")
    for buffer in root.buffers():
        tracker.adopt(buffer, "buffers")


def _watch_gradients(root: nn.Module, tracker: Tracker) -> Iterator[Any]:
    def made(parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            tracker.adopt_gradient(parameter.grad)

    for parameter in root.parameters():
        if parameter.requires_grad:
            yield parameter.register_post_accumulate_grad_hook(made)  # type: ignore[no-untyped-call]


@contextmanager
def _one_process_for_all(root: nn.Module) -> Iterator[None]:
    """The engine, without what needs real ranks and real memory: comparing starts, and moving to the device."""
    with (
        warnings.catch_warnings(),
        patched(engine, "agree_on_start", lambda module, device: 0),
        patched(engine, "require_same_files", lambda places: None),
        patched(root, "to", lambda device: root),
    ):
        # Of fake tensors that are asked for an address (the engine compares two; both have none).
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*")
        yield
