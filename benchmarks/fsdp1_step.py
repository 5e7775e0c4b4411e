"""A step under torch's FSDP1, for simulating published runs of it with the code that ran: torch's own wrapper,
on fake tensors, around transformers' model.

FSDP1 differs from FSDP2 in what it holds: a flat parameter per unit, the root whole through both passes, and with
frozen units their recomputed inputs and those inputs' gradients to the end of backward (their hooks keep them).
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.utils.checkpoint import checkpoint

from benchmarks.published import Published
from lightning_shard import Plan, TrainSpec
from lightning_shard._compat import fake_tensor_mode
from lightning_shard.blocks import find_blocks
from lightning_shard.cli.plan import parsed
from lightning_shard.simulate.allocator import CachingAllocator
from lightning_shard.simulate.build import to_fake
from lightning_shard.simulate.cuda_like import allocate_as_cuda
from lightning_shard.simulate.optimizers import warm_up
from lightning_shard.simulate.patches import patched
from lightning_shard.simulate.source import Runnable, make_runnable
from lightning_shard.simulate.tracker import Tracker
from lightning_shard.simulate.world import fake_world

PENDING = "freed, in use on another stream"


@dataclass(frozen=True, kw_only=True)
class Fsdp1Job:
    """How a published run used FSDP1."""

    ranks: int
    train: TrainSpec
    dtype: str | None
    """Storage type of the model as loaded."""
    recompute: str
    """``outside``: the model checkpoints calls of its wrapped blocks, as transformers did up to 4.4x, with reentrant
    backward; ``inside``: each wrapped unit checkpoints its block, as torchtitan did; empty: neither.
    """
    active: bool
    """Whether the figure is of active bytes: tensors that another stream still uses count until it is through."""

    @property
    def mixed(self) -> MixedPrecision | None:
        row = self.train.precision_row
        if row.compute_dtype is None or row.frozen_dtype is not None:
            return None  # computes in the type it stores
        types = (getattr(torch, name) for name in (row.compute_dtype, row.reduce_dtype))
        return MixedPrecision(*types)


def job_of(row: Published) -> Fsdp1Job | None:
    """How a row used FSDP1; None where it did not."""
    if row.arguments is None or not row.sharding.startswith("FSDP1"):
        return None
    arguments, train = parsed(["--model", row.model, *row.arguments.split()])
    where = "outside" if row.id.startswith("FMS-") else "inside"
    return Fsdp1Job(
        ranks=arguments.devices * arguments.nodes,
        train=train,
        dtype=arguments.dtype,
        recompute=where if row.recompute else "",
        active="active" in row.measured_as,
    )


def reserved(job: Fsdp1Job, model: Path) -> int:
    """What the caching allocator holds for one step, in which memory that two streams use waits for both."""
    events = _tracked(dataclasses.replace(job, active=True), model).events
    return CachingAllocator().replay(events).peak_reserved_bytes


def simulated(job: Fsdp1Job, model: Path) -> int:
    """Bytes at the peak of one step on the first rank."""
    return max(peak.allocated_bytes for peak in _tracked(job, model).peaks.values())


def _tracked(job: Fsdp1Job, model: Path) -> Tracker:
    """One step on the first rank."""
    runnable = make_runnable(model, job.train, dtype=job.dtype)
    root, tracker = runnable.root, Tracker()
    _store_what_trains(root, job.train)
    if job.train.adapter is not None and job.recompute == "outside":
        root.model.enable_input_require_grads()  # type: ignore[operator, union-attr]  # reentrant backward needs one
    with ExitStack() as stack:
        stack.enter_context(fake_world(Plan(dp_shard=job.ranks)))
        stack.enter_context(fake_tensor_mode())
        stack.enter_context(allocate_as_cuda())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of what FSDP1 warns about when it runs on a host
        to_fake(root)
        wrapped = _wrapped(root, job)
        for parameter in wrapped.parameters():
            tracker.adopt(parameter, "trained_weights" if parameter.requires_grad else "frozen_weights")
        for buffer in wrapped.buffers():
            tracker.adopt(buffer, "buffers")
        with tracker:
            _step(root, wrapped, runnable, tracker, active=job.active)
    return tracker


def _store_what_trains(root: nn.Module, train: TrainSpec) -> None:
    dtype = getattr(torch, train.precision_row.master_dtype)
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad and parameter.dtype != dtype:
                module._parameters[name] = nn.Parameter(parameter.to(dtype))


def _wrapped(root: nn.Module, job: Fsdp1Job) -> FullyShardedDataParallel:
    """Units are the blocks and, inside them, every leaf of an adapter: peft's policy, since a unit has one type."""
    units: set[type[nn.Module]] = {type(block) for _, block in find_blocks(root)}
    if job.recompute == "inside":
        _replace(root, lambda module: type(module) in units, partial(_Recomputed, reentrant=False))
        units = {_Recomputed}

    def is_unit(module: nn.Module) -> bool:
        weight = getattr(module, "weight", None)
        leaf = job.train.adapter is not None and not list(module.children())
        return type(module) in units or (leaf and weight is not None and weight.requires_grad)

    policy, cpu = CustomPolicy(is_unit), torch.device("cpu")
    wrapped = FullyShardedDataParallel(root, auto_wrap_policy=policy, device_id=cpu, mixed_precision=job.mixed)
    if job.recompute == "outside":
        _replace(root, lambda module: _holds(module, units), partial(_Recomputed, reentrant=True))
    return wrapped


def _holds(module: nn.Module, units: set[type[nn.Module]]) -> bool:
    return isinstance(module, FullyShardedDataParallel) and type(module.module) in units


class _Recomputed(nn.Module):
    """A block that recomputes itself in backward."""

    def __init__(self, block: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.block = block
        self._reentrant = reentrant

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        block = partial(self.block, **kwargs)
        return checkpoint(block, *args, use_reentrant=self._reentrant, preserve_rng_state=False)


def _replace(root: nn.Module, wanted: Callable[[nn.Module], bool], by: Callable[[nn.Module], nn.Module]) -> None:
    for module in list(root.modules()):
        for name, child in list(module.named_children()):
            if wanted(child):
                setattr(module, name, by(child))


def _step(root: Any, wrapped: nn.Module, runnable: Runnable, tracker: Tracker, *, active: bool) -> None:
    optimizers = runnable.optimizers(wrapped)
    with tracker.paused():
        warm_up(optimizers, tracker, keep_gradients=False, offload="none")
    forward = root.forward
    with ExitStack() as stack:

        def once(*args: Any) -> Any:
            root.forward = forward
            if active:  # from here on: the first call has by now made, and freed, the room of every unit
                stack.enter_context(_active(tracker))
            return root.training_step(*args)

        root.forward = once
        wrapped(runnable.batch(), 0).backward()
    with tracker.during("optimizer_step"):
        for optimizer in optimizers:
            optimizer.step()


@contextmanager
def _active(tracker: Tracker) -> Iterator[None]:
    """Inside, what FSDP1 frees stays counted until the host has waited for its streams.

    It marks gathered weights as used by two streams, and the allocator gives such memory on only when both are past
    the free. The one point that the host can be sure of is its rate limiter, which waits for the event recorded at
    the last free but one before it gathers again.
    """
    freed: list[Any] = []
    taken_on: dict[int, Any] = {}
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        result = resize(storage, size)
        if size:
            taken_on[id(storage)] = torch.cpu.current_stream()
        elif before:
            with tracker.during(PENDING), torch.cpu.stream(taken_on.get(id(storage), torch.cpu.current_stream())):
                freed.append(torch.empty(before, dtype=torch.uint8))
        return result

    class Event(torch.cpu.Event):
        def record(self, stream: Any = None) -> None:
            self._freed, freed[:] = freed[:], ()

        def synchronize(self) -> None:
            self._freed = []

    with patched(torch.UntypedStorage, "resize_", resize_), patched(torch.cpu, "Event", Event):
        yield
