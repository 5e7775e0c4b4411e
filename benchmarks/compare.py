"""Run engines in turn on several ranks, check that they learn the same, and set their times against each other."""

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.launch import Node, launch
from benchmarks.options import Row
from benchmarks.stats import median, ratio, spread
from benchmarks.work import Work

TOLERANCE = {"32-true": 2e-4, "bf16-mixed": 1e-2}
"""Relative difference of losses between engines, by precision: they add up in different orders."""


def compare(
    work: Work,
    names: Sequence[str],
    ranks: int,
    *,
    warm_up: int = 3,
    nodes: Sequence[Node] = (Node(),),
    links: list[Any] | None = None,
    probed_bytes: tuple[int, ...] | None = None,
) -> list[Row]:
    """One row per engine: the median step of the slowest rank, and its ratio to every other engine's.

    Args:
        work: what they train.
        names: of :func:`benchmarks.engines.engines`. ``local`` stands for a rank that talks to no other: its losses
            are its own.
        ranks: how many.
        warm_up: first steps that are left out (first gathers, optimizer state). The third one is counted instead:
            what it sends, and what the rank holds when it ends.
        nodes: where the ranks run.
        links: a list that gets the LinkProfile of these ranks, measured before they start.
        probed_bytes: sizes of the messages for that.

    Raises:
        RuntimeError: when two engines do not compute the same losses.
    """
    probe = None if links is None else (ranks // len(nodes), probed_bytes)
    results = launch(ranks, _body, work, list(names), probe, device=work.device, nodes=nodes)
    by_rank = [engines for engines, _ in results]
    if links is not None:
        links.append(results[0][1])
    losses_agree(by_rank, TOLERANCE[work.precision])
    times = {name: _slowest([rank[name]["times_s"] for rank in by_rank], warm_up) for name in names}
    return [_row(name, names, times, [rank[name] for rank in by_rank]) for name in names]


def _row(name: str, names: Sequence[str], times: dict[str, list[float]], by_rank: list[dict[str, Any]]) -> Row:
    others = [other for other in names if other != name]
    return {
        "engine": name,
        "step_s": median(times[name]),
        "spread": spread(times[name]),
        "steps": len(times[name]),
        "ratios": {other: ratio(times[name], times[other]) for other in others},
        "extra_s": {other: _extra(times[name], times[other]) for other in others},
        "last_loss": by_rank[0]["losses"][-1],
        **{key: max(rank["facts"][key] for rank in by_rank) for key in MEASURED if key in by_rank[0]["facts"]},
        **{key: by_rank[0]["facts"][key] for key in ("collectives", "plan") if key in by_rank[0]["facts"]},
    }


MEASURED = ("held_bytes", "sent_bytes")
"""Figures of which the fullest rank's counts."""


Probe = tuple[int, tuple[int, ...] | None]


def _body(work: Work, names: list[str], probe: Probe | None) -> tuple[dict[str, dict[str, Any]], Any]:
    """What one rank measures: of every engine, and of the links."""
    import torch.distributed as dist

    from benchmarks.engines import engines
    from benchmarks.turns import take_turns
    from benchmarks.work import batches

    rank = dist.get_rank() if dist.is_initialized() else 0
    links = None if probe is None else _measure_links(work, *probe)
    measured = take_turns(
        engines(work, names),
        lambda: batches(work, rank),
        steps=work.steps,
        accumulate=work.accumulate,
        device=work.device,
    )
    engines_found = {
        name: {"times_s": one.times_s[: work.steps - 1], "losses": one.losses, "facts": one.facts}
        for name, one in measured.items()
    }
    return engines_found, links


def _measure_links(work: Work, local_size: int, sizes: tuple[int, ...] | None) -> Any:
    """What ``lightning-shard probe`` measures, on this job's own ranks."""
    from benchmarks.engines import device_of
    from lightning_shard.probe import measure_links

    return measure_links(local_size, device_of(work), *(() if sizes is None else (sizes,)))


def losses_agree(by_rank: list[dict[str, dict[str, Any]]], tolerance: float) -> None:
    """Raise RuntimeError unless all engines had the same losses on every rank."""
    for rank, engines in enumerate(by_rank):
        together = {name: one["losses"] for name, one in engines.items() if name != "local"}
        first, reference = next(iter(together.items()))
        for name, losses in together.items():
            worst = max(abs(mine / theirs - 1) for mine, theirs in zip(losses, reference, strict=True))
            if worst > tolerance:
                raise RuntimeError(
                    f"{name} and {first} do not compute the same losses on rank {rank}: they differ by {worst:.1e}, "
                    f"more than {tolerance:.0e}. Their times are not comparable."
                )


def _slowest(times: list[list[float]], warm_up: int) -> list[float]:
    return [max(step) for step in zip(*times, strict=True)][warm_up:]


def _extra(times: list[float], others: list[float]) -> float:
    return statistics.median(mine - theirs for mine, theirs in zip(times, others, strict=True))
