"""From 1 to 1,024 ranks by simulation: collectives and bytes per rank, planner time, and that theory has it so."""

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
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
TOLERANCE = 0.01
BLOCK_BYTES = 512
"""What the allocator rounds tensors up to."""


@dataclass
class Shapes:
    """Of every frozen parameter, and the bytes of the adapters."""

    blocks: list[tuple[int, ...]]
    rest: list[tuple[int, ...]]
    adapter_bytes: int

    @property
    def all(self) -> list[tuple[int, ...]]:
        return [*self.blocks, *self.rest]


def run(options: Options) -> Iterator[list[Row]]:
    """Simulate every layout at every size, and assert how it grows."""
    ranks = RANKS[:3] if options.smallest else RANKS
    size = "tiny" if options.smallest else SIZE
    with tempfile.TemporaryDirectory() as name:
        shapes = launch(1, prepare, size, name)[0]
        for layout in LAYOUTS[:2] if options.smallest else LAYOUTS:
            rows = launch(1, simulate_all, size, name, layout, ranks)[0]
            for row in rows:
                print(_line(row), flush=True)
            require_growth(layout, rows, shapes)
            yield rows


def prepare(size: str, folder: str) -> Shapes:
    """The model's config in a folder, and the shapes of its parameters."""
    import torch

    from benchmarks.work import Work, build, llama_config

    llama_config(size, 128).save_pretrained(folder)
    with torch.device("meta"):
        model = build(Work(size=size, training="lora", tokens=128))
    shapes = Shapes(blocks=[], rest=[], adapter_bytes=0)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            shapes.adapter_bytes += 4 * parameter.numel()
        else:
            (shapes.blocks if ".layers." in name else shapes.rest).append(tuple(parameter.shape))
    return shapes


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


def require_growth(layout: str, rows: list[Row], shapes: Shapes) -> None:
    """Raise RuntimeError unless collectives and bytes grow with the ranks as theory says.

    All layouts: no more collectives on 1,024 ranks than on 2, and (N-1)/N of what they move is sent. DDP reduces the
    gradients once. Full sharding gathers blocks and the rest once or twice each, scatters gradients once, and holds
    1/N of weights and state. With adapters their gradients alone are reduced; with the base resident nothing is
    gathered. Shards are of whole rows or columns, so on more ranks than a matrix has of either its gathers grow again.
    """
    several = [row for row in rows if row["ranks"] > 1]
    first = several[0]
    for row in several:
        n, moved = row["ranks"], {kind: size for kind, (_, size) in row["collectives"].items()}
        blocks, rest = (_gathered(group, n) for group in (shapes.blocks, shapes.rest))
        _counts_as_at_first(row, first)
        if layout == "ddp-full":
            _near(row, "all-reduced", moved["all_reduce"], 4 * sum(map(prod, shapes.all)))
            _near(row, "state", row["state_bytes"], first["state_bytes"])
            continue
        if layout == "fsdp2-full":
            whole, scattered = 4 * sum(map(prod, shapes.all)), moved["reduce_scatter"]
            right = whole * (1 - TOLERANCE) <= scattered <= (blocks + rest) * (1 + TOLERANCE)
            _require(right, row, f"scattered {scattered:,} bytes; theory says {whole:,} to {blocks + rest:,}")
            _near(row, "state", row["state_bytes"], 3 * _held(shapes.all, n))
        else:
            _near(row, "all-reduced", moved["all_reduce"], shapes.adapter_bytes)
        if layout == "resident-lora":
            _require("all_gather" not in moved, row, f"gathers {moved}")
            continue
        least = blocks + rest
        gathered = moved["all_gather"]
        _require(least * 0.999 <= gathered <= 2.001 * least, row, f"gathers {gathered:,} of {least:,} bytes")
        grown = gathered / first["collectives"]["all_gather"][1]
        ratios = sorted(_gathered(group, n) / _gathered(group, 2) for group in (shapes.blocks, shapes.rest))
        _require(0.999 * ratios[0] <= grown <= 1.001 * ratios[1], row, f"gathers grew {grown:.3f} times, not {ratios}")


def _counts_as_at_first(row: Row, first: Row) -> None:
    """As many collectives of each kind as on two ranks; replicas take larger and so fewer buckets on more ranks."""
    counts, at_first = ({kind: count for kind, (count, _) in r["collectives"].items()} for r in (row, first))
    if row["layout"] == "ddp-full":
        _require(
            counts.keys() == {"all_reduce"} and counts["all_reduce"] <= at_first["all_reduce"], row, f"calls {counts}"
        )
    else:
        _require(counts == at_first, row, f"calls {counts}, on two ranks {at_first}")


def _gathered(group: list[tuple[int, ...]], n: int) -> int:
    """Bytes of the whole side of a gather: every rank sends as much as the fullest one has."""
    return sum(n * _fullest(shape, n) for shape in group)


def _held(group: list[tuple[int, ...]], n: int) -> int:
    """Bytes of the fullest rank's shards, each rounded up as the allocator does."""
    return sum(-(-_fullest(shape, n) // BLOCK_BYTES) * BLOCK_BYTES for shape in group)


def _fullest(shape: tuple[int, ...], n: int) -> int:
    """Bytes of the largest shard: of rows, or of columns where those divide evenly and rows do not."""
    if len(shape) > 1 and shape[0] % n and shape[1] % n == 0:
        return 4 * prod(shape) // n
    return 4 * prod(shape[1:]) * -(-shape[0] // n)


def _near(row: Row, what: str, found: float, theory: float) -> None:
    _require(abs(found / theory - 1) <= TOLERANCE, row, f"{what} {found:,.0f} bytes; theory says {theory:,.0f}")


def _require(true: bool, row: Row, message: str) -> None:
    if not true:
        raise RuntimeError(f"{row['case']}: {message}")


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
