"""From 1 to 1,024 ranks by simulation: collectives and bytes per rank, planner time, and that theory has it so."""

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.launch import launch
from benchmarks.options import Options, Row
from benchmarks.plan_time import h100s
from benchmarks.report import table
from benchmarks.turns import sent_over
from lightning_shard import AdapterSpec, ModelSpec, Plan, TrainSpec
from lightning_shard.planner import choose

RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
LAYOUTS = ("ddp-full", "fsdp2-full", "fsdp2-lora", "resident-lora")
SIZE = "s"
TOLERANCE = 0.02
"""Uneven shards are padded, so a gather is a little larger than what it gathers."""


def run(options: Options) -> Iterator[list[Row]]:
    """Simulate every layout at every size, and assert how it grows."""
    ranks = RANKS[:3] if options.smallest else RANKS
    size = "tiny" if options.smallest else SIZE
    with tempfile.TemporaryDirectory() as name:
        facts = launch(1, prepare, size, name)[0]
        for layout in LAYOUTS[:2] if options.smallest else LAYOUTS:
            rows = launch(1, simulate_all, size, name, layout, ranks)[0]
            for row in rows:
                print(_line(row), flush=True)
            require_growth(layout, rows, facts)
            yield rows


def prepare(size: str, folder: str) -> dict[str, int]:
    """The model's config in a folder, and its bytes: all, those of blocks, and adapters."""
    from benchmarks.work import llama_config

    llama_config(size, 128).save_pretrained(folder)
    spec = ModelSpec.from_pretrained(folder)
    adapted = choose(spec, _train("lora"), h100s(1)).estimate
    assert adapted.allocated_bytes > 0
    return {"weights": 4 * spec.num_parameters, "blocks": spec.num_blocks}


def _train(training: str) -> TrainSpec:
    adapter = AdapterSpec(r=8) if training == "lora" else None
    return TrainSpec(seq_len=128, precision="32-true", adapter=adapter)


def plan_of(layout: str, ranks: int, blocks: int) -> Plan:
    """One device holds everything, whatever the layout."""
    if layout == "ddp-full" or ranks == 1:
        return Plan(dp_replicate=ranks)
    if layout == "resident-lora":
        return Plan(dp_shard=ranks, resident_blocks=blocks, adapters="replicated")
    return Plan(dp_shard=ranks, adapters="replicated" if layout == "fsdp2-lora" else "sharded")


def simulate_all(size: str, folder: str, layout: str, ranks: tuple[int, ...]) -> list[Row]:
    """One row per number of ranks."""
    from lightning_shard.simulate import simulate

    spec = ModelSpec.from_pretrained(folder)
    train = _train(layout.rpartition("-")[2])
    rows = []
    for count in ranks:
        simulation = simulate(Path(folder), train, plan_of(layout, count, spec.num_blocks))
        start = time.perf_counter()
        choose(spec, train, h100s(count))
        collectives = {each.kind: [each.count, each.num_bytes] for each in simulation.collectives}
        rows.append(
            {
                "case": f"{layout}-{count}",
                "layout": layout,
                "model": size,
                "ranks": count,
                "collectives": collectives,
                "sent_bytes": sent_over(collectives, count),
                "peak_bytes": simulation.allocated_bytes,
                "state_bytes": sum(simulation.kinds.get(kind, 0) for kind in STATE),
                "simulation_s": simulation.wall_s,
                "planner_s": time.perf_counter() - start,
            }
        )
    return rows


STATE = ("frozen_weights", "trained_weights", "optimizer_state")


def require_growth(layout: str, rows: list[Row], facts: dict[str, int]) -> None:
    """Raise RuntimeError unless collectives and bytes grow with the ranks as theory says.

    All layouts: as many collectives on 1,024 ranks as on 2. DDP sends 2 (N-1)/N of the gradients; full sharding
    gathers blocks twice and the rest once and scatters once; a resident base sends adapters alone. Weights and
    optimizer state at rest fall as 1/N where they are sharded.
    """
    several = [row for row in rows if row["ranks"] > 1]
    counts = {tuple(sorted((kind, n) for kind, (n, _) in row["collectives"].items())) for row in several}
    _require(len(counts) == 1, f"{layout}: the number of collectives changes with the ranks: {counts}")
    for row in several:
        n, (low, high) = row["ranks"], _whole_bytes(layout, facts)
        share = row["sent_bytes"] / ((n - 1) / n)
        _require(
            low * (1 - TOLERANCE) <= share <= high * (1 + TOLERANCE) * _padding(n, layout),
            f"{row['case']}: sends {share:,.0f} bytes over (N-1)/N; theory says {low:,} to {high:,}",
        )


def _whole_bytes(layout: str, facts: dict[str, int]) -> tuple[int, int]:
    """What travels, over (N-1)/N: at least and at most."""
    weights = facts["weights"]
    if layout == "ddp-full":
        return 2 * weights, 2 * weights
    if layout == "fsdp2-full":  # gathered once or twice (blocks twice, the root once), scattered once
        return 2 * weights, 3 * weights
    if layout == "fsdp2-lora":
        return weights, int(2.2 * weights)
    return 1, weights  # resident: adapters, and what is outside the blocks


def _padding(n: int, layout: str) -> float:
    """Dim-0 shards of few rows are padded to whole rows: on many ranks a matrix of 192 rows becomes one of 1,024."""
    return max(1.0, n / 64) if layout.startswith(("fsdp2", "resident")) else 1.0


def _require(true: bool, message: str) -> None:
    if not true:
        raise RuntimeError(message)


def _line(row: Row) -> str:
    sent, peak = row["sent_bytes"] / 1e6, row["peak_bytes"] / 1e6
    return f"{row['case']:<20} {_calls(row):<50} sent {sent:8.2f} MB peak {peak:8.2f} MB simulated in {row['simulation_s']:.1f} s"


def _calls(row: Row) -> str:
    return ", ".join(f"{n} {kind.replace('_', '-')}" for kind, (n, _) in row["collectives"].items()) or "none"


def tables(rows: list[Row]) -> list[str]:
    parts: list[Any] = []
    for layout in dict.fromkeys(row["layout"] for row in rows):
        some = sorted((row for row in rows if row["layout"] == layout), key=lambda row: row["ranks"])
        body = [
            [row["ranks"], _calls(row), f"{row['sent_bytes'] / 1e6:.2f}", f"{row['state_bytes'] / 1e6:.2f}",
             f"{row['peak_bytes'] / 1e6:.2f}", f"{1e3 * row['planner_s']:.0f}", f"{row['simulation_s']:.1f}"]
            for row in some
        ]  # fmt: skip
        columns = [
            "ranks",
            "collectives a step",
            "MB sent per rank",
            "MB at rest",
            "MB peak",
            "planner ms",
            "simulation s",
        ]
        parts += [f"**{layout}**:", table(columns, body)]
    return parts
