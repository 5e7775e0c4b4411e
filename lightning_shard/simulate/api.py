"""Simulate a plan: from whatever describes the model to a report."""

import dataclasses
import logging
import time
from typing import Any, Literal

import torch

import lightning_shard.parallelize as engine
from lightning_shard._compat import LightningModule
from lightning_shard.plans import Plan
from lightning_shard.simulate.collectives import summarise
from lightning_shard.simulate.depth import Counted, NotLinearError, extrapolate
from lightning_shard.simulate.moments import in_order
from lightning_shard.simulate.reserve import Trace, device_bytes, replay
from lightning_shard.simulate.result import Simulation
from lightning_shard.simulate.run import simulate_step
from lightning_shard.simulate.source import Runnable, Source, make_runnable
from lightning_shard.simulate.step import ZeroGrad
from lightning_shard.simulate.tracker import Tracker
from lightning_shard.simulate.truncate import can_truncate, num_blocks, truncate
from lightning_shard.simulate.user import without_logging
from lightning_shard.specs import Precision, TrainSpec

log = logging.getLogger(__name__)

DEPTHS = (4, 5, 6)
"""Blocks of the runs that a deep model is extrapolated from; the middle one is the check."""
MOST_BLOCKS = 48
"""Up to this many blocks all are run."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Options:
    batch: Any
    dtype: str | None
    zero_grad: ZeroGrad | None
    expandable_segments: bool


def simulate(
    model: Source,
    train: TrainSpec,
    plan: Plan,
    *,
    batch: Any = None,
    dtype: str | None = None,
    zero_grad: ZeroGrad | None = None,
    expandable_segments: bool = False,
    depth: Literal["auto", "full", "extrapolated"] = "auto",
) -> Simulation:
    """Run one optimizer step of ``plan`` on tensors without memory, in a process group without ranks.

    The step is the product's own: its ``parallelize``, the user's LightningModule (``configure_model``,
    ``training_step``, ``configure_optimizers``) where there is one, else a causal language model's loss and
    torch's optimizer. No GPU is used, and no weights are read. Torch's global state is as before afterwards;
    a process group in use is set aside meanwhile, so one rank of a job can simulate while the others wait.

    Args:
        model: a folder with a ``config.json``, a hub id, a function that builds a module, or a live module.
        train: batch, precision, adapter (not for a LightningModule, which brings its own), optimizer.
        plan: what to run.
        batch: the largest batch a step sees, or a function that makes one; token ids by default.
        dtype: storage type of a model given by its path, before the precision's own rules (FP32 by default).
        zero_grad: when gradients are cleared; by default as Lightning does for a LightningModule
            (``before_backward``), else as ``train`` says.
        expandable_segments: the allocator's setting of that name.
        depth: how many blocks are run: all, or as few as extrapolate exactly; ``auto`` runs all of up to 48.

    Raises:
        ValueError: for a plan, model or optimizer that cannot be simulated; says which and what to do.
    """
    engine.require_supported(plan)
    start = time.monotonic()
    options = _Options(batch=batch, dtype=dtype, zero_grad=zero_grad, expandable_segments=expandable_segments)
    with torch.random.fork_rng(devices=[]):
        counted, depths = _count(model, train, plan, options, depth)
    peak = max(counted.moments, key=lambda moment: moment.allocated_bytes)
    return Simulation(
        plan=plan,
        allocated_bytes=peak.allocated_bytes,
        peak_at=peak.name,
        kinds=peak.kinds,
        moments=counted.moments,
        reserved_bytes=counted.reserved_bytes,
        device_bytes=device_bytes(counted.reserved_bytes, plan.world_size),
        collectives=counted.collectives,
        guessed_branches=counted.guessed_branches,
        not_modelled=_not_modelled(train, plan, counted),
        depths=depths,
        num_blocks=counted.num_blocks,
        wall_s=time.monotonic() - start,
    )


def _count(
    model: Source, train: TrainSpec, plan: Plan, options: _Options, depth: str
) -> tuple[Counted, tuple[int, ...]]:
    runnable = _runnable(model, train, options)
    total = num_blocks(runnable.root)
    shallow = depth == "extrapolated" or (depth == "auto" and total > MOST_BLOCKS)
    if not shallow or total <= DEPTHS[-1] or not can_truncate(runnable.root, plan):
        return _run(runnable, train, plan, options), ()
    plan = _with_fixed_buckets(runnable, plan)
    runs = []
    for count in DEPTHS:
        part = _runnable(model, train, options)
        truncate(part.root, count)
        runs.append(_run(part, train, plan, options))
    try:
        return extrapolate(runs, total), DEPTHS
    except NotLinearError as error:
        log.info("All %d blocks are run: memory is not linear in them (%s).", total, error)
        return _run(runnable, train, plan, options), ()


def _runnable(model: Source, train: TrainSpec, options: _Options) -> Runnable:
    return make_runnable(model, train, batch=options.batch, dtype=options.dtype)


def _run(runnable: Runnable, train: TrainSpec, plan: Plan, options: _Options) -> Counted:
    blocks = num_blocks(runnable.root)
    with without_logging():
        tracker = simulate_step(
            runnable.root,
            dataclasses.replace(plan, compile=False),
            simulated_precision(train),
            batch=runnable.batch,
            optimizers=runnable.optimizers,
            accumulate=train.accumulate,
            zero_grad=options.zero_grad or _clears(runnable, train),
        )
    return Counted(
        num_blocks=blocks,
        moments=in_order(tracker.peaks.values()),
        collectives=summarise(tracker.collectives),
        reserved_bytes=replay(trace_of(tracker), expandable_segments=options.expandable_segments).peak_reserved_bytes,
        guessed_branches=tracker.guesses.count,
    )


def _clears(runnable: Runnable, train: TrainSpec) -> ZeroGrad:
    return "before_backward" if isinstance(runnable.root, LightningModule) else train.gradients_cleared


def trace_of(tracker: Tracker) -> Trace:
    """The parts of a tracked step's trace."""
    state, gradients, step = tracker.marks
    events = tracker.events
    return Trace(
        setup=tuple(events[:state]),
        state=tuple(events[state:gradients]),
        gradients=tuple(events[gradients:step]),
        step=tuple(events[step:]),
    )


def simulated_precision(train: TrainSpec) -> Precision:
    """The precision's row; an adapter that computes in FP32 is plain peft's, without any cast of ours."""
    row = train.precision_row
    if train.adapter is not None and train.adapter.compute_dtype == "float32" and row.frozen_dtype is not None:
        return dataclasses.replace(row, compute_dtype=None)
    return row


def _with_fixed_buckets(runnable: Runnable, plan: Plan) -> Plan:
    """The bucket size of the whole model, which fewer blocks would make smaller."""
    if plan.strategy != "ddp" or plan.bucket_cap_mb is not None:
        return plan
    from lightning_shard.plans import MIB, tuned_bucket_bytes

    trainable_bytes = sum(4 * p.numel() for p in runnable.root.parameters() if p.requires_grad)
    return dataclasses.replace(plan, bucket_cap_mb=tuned_bucket_bytes(trainable_bytes, plan.world_size) / MIB)


def _not_modelled(train: TrainSpec, plan: Plan, counted: Counted) -> tuple[str, ...]:
    notes = ["workspaces inside kernels (attention's backward, convolutions), beyond one constant"]
    guesses = counted.guessed_branches
    if guesses:
        notes.append(f"{guesses} values that decide a branch or a size were guessed: masks select everything")
    if plan.compile:
        notes.append(
            "torch.compile: the step is run eagerly, which needs more memory as a rule (the analytic estimate counts it compiled)"
        )
    if train.precision == "16-mixed":
        notes.append("the gradient scaler of 16-mixed")
    if plan.offload == "all":
        notes.append("shards on their way between host and device")
    if plan.world_size > 1:
        notes.append("communication buffers are a planning constant")
    return tuple(notes)
