"""Take the fastest plan that fits with headroom; of those about as fast, the simplest."""

from collections.abc import Mapping
from typing import Any

from lightning_shard.hardware import Cluster
from lightning_shard.memory.situation import make_situation
from lightning_shard.planner.advice import Surroundings, what_helps
from lightning_shard.planner.checklist import checklist
from lightning_shard.planner.considered import GIVEN_BACK, Considered, estimate, inject
from lightning_shard.planner.decision import Decision, Rejected, usable_bytes
from lightning_shard.planner.grid import check_pins, simplicity, why_not_resident
from lightning_shard.planner.search import Search
from lightning_shard.specs import ModelSpec, TrainSpec, format_bytes

__all__ = ["choose", "estimate"]

TIE, TIE_S = 0.1, 1e-3
"""Predicted step times this close, in share or in seconds, are no reason to prefer one plan: the model of time is
that good at best."""
SHARDS_UNSURE = 0.5
"""How much longer than predicted the collectives of shards may take, against replicas: many messages, with host work
before and after each, are what the model of time sees least of. Where a whole copy fits, sharding must win even so.
Against a frozen base that fits whole, which costs replicas no traffic, the whole step is taken for that unsure."""


def choose(
    model: ModelSpec,
    train: TrainSpec,
    cluster: Cluster,
    *,
    headroom: float = 0.1,
    pin: Mapping[str, Any] | None = None,
    surroundings: Surroundings = "python",
) -> Decision:
    """Decide how to run.

    The fastest plan that fits wins, among those without tensor parallelism as long as one fits: ranks that split
    layers see the same data, so each step would learn from fewer sequences. Step times are predictions, so plans within
    :data:`TIE` of the fastest count as equally fast (replicas: of every other plan, should its shards' collectives take
    :data:`SHARDS_UNSURE` longer), and the simplest of them is taken: DDP before sharding, one kind of sharding before
    two, no recomputing before some. When nothing fits, the leanest plan still does if its live tensors do and the
    allocator gives back what it holds besides, which costs time; else the answer is the plan that needs least, with the shortfall
    and what would help.

    Args:
        model: what to train; the adapter that ``train`` wants is injected unless it is there already.
        train: how to train it.
        cluster: where.
        headroom: share of each device's memory to leave free.
        pin: fields of the Plan that are not to be chosen.
        surroundings: where the advice will be read, so that it names what can be typed there.

    Raises:
        ValueError: for a pin the engine cannot carry out, a headroom out of range, or a sequence the model
            has no positions for.
        TypeError: for a model, training, pin or headroom of another type.
    """
    _check(model, train, cluster, headroom)
    pin = {} if pin is None else pin
    check_pins(pin)
    model = inject(model, train)
    _check_names(model, pin)
    refusal = why_not_resident(model, train)
    if pin.get("resident_blocks") and refusal is not None:
        raise ValueError(f"pin resident_blocks={pin['resident_blocks']!r} cannot be carried out: {refusal}.")
    limit = usable_bytes(cluster.capacity_bytes, headroom)
    found = Search(model, train, cluster, limit, pin).run()
    best = _best(found, limit)
    fits = best.needs_bytes <= limit
    short = 0 if fits else best.needs_bytes - limit
    return Decision(
        plan=best.plan,
        estimate=best.estimate,
        capacity_bytes=cluster.capacity_bytes,
        headroom=headroom,
        fits=fits,
        reason=_why(best, found, limit, cluster),
        rejected=tuple(_reject(one, best, limit) for one in found if one.plan is not best.plan),
        shortfall_bytes=short,
        advice=_what_ddp_lacks(best, found, limit)
        if fits
        else tuple(what_helps(model, train, cluster, limit, pin, surroundings)),
        checklist=checklist(make_situation(model, train, best.plan, cluster), best.estimate, limit),
    )


def _best(found: list[Considered], limit: int) -> Considered:
    """Of what fits, the simplest among the fastest; of what does not, the leanest."""
    fitting = [one for one in found if one.needs_bytes <= limit]
    if not fitting:
        return min(found, key=lambda one: one.needs_bytes).given_back(limit)
    fitting = [one for one in fitting if one.plan.tp == 1] or fitting
    near = [one for one in fitting if all(_about_as_fast(one, other) for other in fitting)]
    return min(near, key=lambda one: (simplicity(one.plan), round(one.share_s, 9), one.needs_bytes))


def _about_as_fast(one: Considered, other: Considered) -> bool:
    surely_s = other.share_s
    if one.plan.strategy == "ddp":
        terms, time = one.estimate.terms, other.estimate
        frozen = terms.get("frozen_weights", 0) > terms.get("trained_weights", 0)
        unsure_s = time.step_s if frozen else time.shard_comm_s
        surely_s += SHARDS_UNSURE * unsure_s / other.plan.data_parallel_size
    return one.share_s <= surely_s * (1 + TIE) + TIE_S / one.plan.data_parallel_size


def _check(model: ModelSpec, train: TrainSpec, cluster: Cluster, headroom: float) -> None:
    for name, value, kind in (("model", model, ModelSpec), ("train", train, TrainSpec), ("cluster", cluster, Cluster)):
        if not isinstance(value, kind):
            raise TypeError(f"{name}={value!r} must be a {kind.__name__}.")
    if isinstance(headroom, bool) or not isinstance(headroom, (int, float)):
        raise TypeError(f"headroom={headroom!r} must be a number: the share of memory to leave free.")
    if not 0.0 <= headroom < 1.0:
        raise ValueError(f"headroom={headroom} must be at least 0 and below 1: the share of memory to leave free.")
    if model.num_trainable == 0 and train.adapter is None:
        raise ValueError(
            f"Nothing in {model.name} trains: every parameter is frozen. Unfreeze some, or add an adapter."
        )
    arch = model.architecture
    longest = None if arch is None or arch.tokens_per_sample is not None else arch.max_positions
    if longest is not None and train.seq_len > longest:
        raise ValueError(
            f"seq_len={train.seq_len} is beyond the {longest} positions of {model.name}. Use at most {longest}."
        )


def _check_names(model: ModelSpec, pin: Mapping[str, Any]) -> None:
    named = pin.get("resident_blocks")
    known = {name for unit in model.units for name in unit.names}
    unknown = sorted(set(named) - known) if isinstance(named, (list, tuple)) else []
    if unknown:
        raise ValueError(
            f"pin resident_blocks names {', '.join(map(repr, unknown))}, which {model.name} does not have. Its units: "
            f"{', '.join(sorted(known - {''}))}."
        )


def _reject(one: Considered, best: Considered, limit: int) -> Rejected:
    if one.needs_bytes > limit:
        reason = f"needs {format_bytes(one.needs_bytes)} of the {format_bytes(limit)} usable per device"
    elif one.plan.tp != best.plan.tp:
        reason = _splits(one, best)
    elif simplicity(one.plan) > simplicity(best.plan) and _about_as_fast(best, one):
        reason = f"fits, but {best.plan.strategy} is simpler, fits too and is about as fast"
    elif one.estimate.step_s > best.estimate.step_s:
        reason = f"fits, but takes {one.estimate.step_s:.4g} s a step against {best.estimate.step_s:.4g} s"
    else:
        reason = (
            f"fits and is as fast, but needs {format_bytes(one.needs_bytes)} against {format_bytes(best.needs_bytes)}"
        )
    return Rejected(
        plan=one.plan,
        device_bytes=one.estimate.device_bytes,
        step_s=one.estimate.step_s,
        reason=reason,
        terms=one.estimate.terms,
    )


def _splits(one: Considered, best: Considered) -> str:
    """Why not a plan whose tensor-parallel size, and so its number of sequences per step, is another."""
    speed = f"{one.estimate.tokens_per_s:,.0f} tokens/s against {best.estimate.tokens_per_s:,.0f}"
    if one.share_s >= best.share_s:
        return f"fits, but reaches {speed}"
    return (
        f"fits and reaches {speed}, but its steps see {one.plan.data_parallel_size / best.plan.data_parallel_size:g} times "
        f"the sequences, which changes what is learned: pin tp={one.plan.tp} to take it"
    )


def _why(best: Considered, found: list[Considered], limit: int, cluster: Cluster) -> str:
    needs, usable = f"{format_bytes(best.needs_bytes)}", f"{format_bytes(limit)} usable"
    if best.needs_bytes > limit:
        return f"the leanest plan needs {needs} of {usable} per device"
    if GIVEN_BACK in best.estimate.not_modelled:
        return f"live tensors fit in {usable} per device, and the allocator must give back what it holds besides"
    if cluster.world_size == 1:
        return f"one device, so nothing is sharded or reduced: {needs} of {usable}"
    if best.plan.strategy == "ddp":
        recomputing = _recomputing(best)
        return f"a whole copy fits on every device, {needs} of {usable}, {recomputing + ', ' if recomputing else ''}and moves the least"
    whole = _leanest_ddp(found)
    lost = "" if whole is None or whole <= limit else f"a whole copy needs {format_bytes(whole)}; "
    how = ", ".join(filter(None, (_split(best), _resident(best), _recomputing(best), _offloaded(best))))
    sharded = f"sharded over {best.plan.dp_shard} it" if best.plan.dp_shard > 1 else "it"
    return f"{lost}{sharded} needs {needs} of {usable}{', ' + how if how else ''}"


def _split(one: Considered) -> str:
    if one.plan.tp == 1:
        return ""
    return f"with its layers split over {one.plan.tp} ranks that see the same data ({one.plan.data_parallel_size} micro-batches a step)"


def _resident(one: Considered) -> str:
    count = one.plan.resident_blocks
    return f"with {count} blocks kept whole, which need no gathers" if isinstance(count, int) and count else ""


def _recomputing(one: Considered) -> str:
    if one.plan.activation_checkpoint == "none":
        return ""
    count = one.plan.activation_checkpoint_blocks
    return f"with {'all' if count is None else count} blocks recomputing their activations"


def _offloaded(one: Considered) -> str:
    words = {
        "none": "",
        "optimizer": "with the optimizer's state in host memory",
        "all": "with its shards in host memory",
    }
    return words[one.plan.offload]


def _what_ddp_lacks(best: Considered, found: list[Considered], limit: int) -> tuple[str, ...]:
    whole = _leanest_ddp(found)
    if best.plan.strategy == "ddp" or whole is None or whole <= limit:
        return ()
    return (f"with {format_bytes(whole - limit)} more per device DDP would fit",)


def _leanest_ddp(found: list[Considered]) -> int | None:
    return min((one.needs_bytes for one in found if one.plan.strategy == "ddp"), default=None)
