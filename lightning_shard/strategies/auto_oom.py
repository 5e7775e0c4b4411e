"""Which plan comes next when memory runs out, and what an error about it says.

A part of the auto strategy in a file of its own: ``strategy`` is an ``AutoShardStrategy`` throughout.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from lightning_shard.memory import Estimate
from lightning_shard.parallelize.unshard import why_not_anew
from lightning_shard.planner import Decision, choose
from lightning_shard.planner.advice import what_helps
from lightning_shard.plans import Plan
from lightning_shard.specs import ModelSpec, format_bytes
from lightning_shard.strategies.averaging import averaged_modules, serve_shards
from lightning_shard.strategies.facts import host_available
from lightning_shard.strategies.oom import OomLadder
from lightning_shard.strategies.remap import lay_out_under

GUARDED_STEPS = 5
"""Optimizer steps in which memory is new: first gathers, first optimizer state, first long batches."""
LESS = 0.95
"""A plan must be estimated at this share of the failing one's bytes, or below, to be worth a try."""
MOST_WAYS = 3


def guard(strategy: Any) -> OomLadder | None:
    """The ladder of a fit; None where no other plan can be taken in the run."""
    if why_not(strategy):
        return None
    return OomLadder(
        strategy._root.trainer,
        lambda: take_next(strategy),
        lambda: explain(strategy),
        GUARDED_STEPS,
        lambda: host_available(default=0) // strategy.num_processes,
    )


def why_not(strategy: Any) -> str | None:
    """Why no other plan can be taken in the run; None where one can."""
    if not strategy._root.automatic_optimization:
        return "under manual optimization the steps are the module's own"
    if strategy._layout.sharded_by_user:
        return "the module came sharded"
    return why_not_anew(strategy._root, strategy.plan)


def take_next(strategy: Any) -> str | None:
    """Lay the module out by the next leaner plan, on all ranks; what it is, or None where there is none."""
    decision = strategy._decision
    assert decision is not None
    if why_not(strategy):
        return None
    answer = leaner(strategy, decision) if strategy.is_global_zero else None
    answer = strategy.broadcast(answer)
    if answer is None:
        return None
    _lay_out(strategy, answer.plan)
    strategy._decision = answer
    need = f"{format_bytes(answer.estimate.device_bytes)} instead of {format_bytes(decision.estimate.device_bytes)}"
    return f"{differences(decision.plan, answer.plan)}, which needs {need} per device"


def leaner(strategy: Any, decision: Decision) -> Decision | None:
    """The fastest plan that needs less than the one that ran out; None where none does.

    Decided as for a device with less memory. Batches stay what they are: ranks that share one stay the same.
    """
    train, now = strategy._planned_for, decision.plan
    cluster = dataclasses.replace(
        strategy._describe(decision.capacity_bytes), device_memory_bytes=decision.estimate.device_bytes
    )
    pin = {**strategy._pin, "tp": now.tp}
    if strategy._needs_torch_ddp():
        pin["torch_ddp"] = True
    found = choose(ModelSpec.from_module(strategy._root), train, cluster, headroom=1 - LESS, pin=pin)
    if not found.fits:
        return None
    reason = f"memory ran out under the plan before ({differences(found.plan, now)})"
    return dataclasses.replace(found, capacity_bytes=decision.capacity_bytes, headroom=decision.headroom, reason=reason)


def differences(before: Plan, after: Plan) -> str:
    """The fields that a plan changes."""
    old, new = before.to_dict(), after.to_dict()
    return ", ".join(f"{name}={value}" for name, value in new.items() if value != old[name])


def explain(strategy: Any) -> str:
    """What the plan needs by term, and the cheapest ways out. No collective: one rank may be alone with its error."""
    decision = strategy._decision
    assert decision is not None
    ways = list(_ways_out(strategy, decision))[:MOST_WAYS]
    advice = "\n".join(f"  {number}. {way}" for number, way in enumerate(ways, 1))
    reason = why_not(strategy) if strategy._on_oom == "replan" else None
    stays = f"\nThis layout cannot be changed in the run (on_oom='replan'): {reason}." if reason else ""
    table = memory_table(decision.estimate, decision.capacity_bytes)
    return f"{table}{stays}\nWhat would help, cheapest first:\n{advice}"


def explain_on(error: BaseException, strategy: Any) -> None:
    """Add the explanation to an error of torch's, unless it is there."""
    text = str(error)
    if "What would help" not in text:
        error.args = (f"{text}\n{explain(strategy)}",)


def memory_table(estimate: Estimate, capacity_bytes: int) -> str:
    """The estimate's terms, largest first."""
    rows = sorted(estimate.terms.items(), key=lambda row: -row[1])
    lines = [f"  {name.replace('_', ' '):<24}{format_bytes(size):>12}" for name, size in rows]
    total = f"  {'all, per device':<24}{format_bytes(estimate.device_bytes):>12} of {format_bytes(capacity_bytes)}"
    return "\n".join([f"The plan was estimated to need, at its peak ({estimate.peak_at}):", *lines, total])


def _ways_out(strategy: Any, decision: Decision) -> Iterator[str]:
    better = leaner(strategy, decision)
    if better is not None:
        was = decision.plan.to_dict()
        changed = {name: value for name, value in better.plan.to_dict().items() if value != was[name]}
        replan = "" if strategy._on_oom == "replan" else ' (or on_oom="replan", which does it in the run)'
        yield f"AutoShardStrategy(pin={changed}){replan}"
    train = strategy._planned_for
    assert train is not None
    cluster, limit = strategy._describe(decision.capacity_bytes), int(decision.estimate.device_bytes * LESS)
    yield from what_helps(ModelSpec.from_module(strategy._root), train, cluster, limit, strategy._pin)
    yield "a larger headroom, if other processes use the devices: AutoShardStrategy(headroom=0.2)"
    yield "AutoShardStrategy(simulate=True), which plans from this module's own step"
    yield "PYTORCH_ALLOC_CONF=expandable_segments:True, if the error says that much is reserved but not allocated"


def _lay_out(strategy: Any, plan: Plan) -> None:
    """The module in its new layout, under the optimizers that are there."""
    root, callbacks = strategy._root, strategy._root.trainer.callbacks
    averages = averaged_modules(callbacks)
    lay_out_under(strategy.optimizers, root, lambda: strategy.lay_out_anew(plan), averages)
    serve_shards(callbacks, root, strategy._rest, folders=strategy._writes_folders)
    strategy._mixed_casts_follow_plan()
