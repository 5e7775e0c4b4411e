"""Where the host's time in a step goes, by whose code runs, and which collectives a step issues.

Under Python's profiler, which itself costs about as much as it shows: shares count here, and ``step_time`` for time.
"""

import cProfile
import pstats
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.launch import launch
from benchmarks.options import Options, Row
from benchmarks.report import table
from benchmarks.work import Work

ENGINES = ("raw-ddp", "lightning-ddp", "ours-ddp", "lightning-mp", "ours-fsdp2")
OWNERS = {
    "backward": ("run_backward",),
    "collectives": ("torch/distributed/distributed_c10d", "broadcast", "all_reduce", "wait"),
    "FSDP2": ("torch/distributed/fsdp", "torch/distributed/tensor", "torch/distributed/_composable"),
    "optimizer": ("torch/optim",),
    "ours": ("lightning_shard/",),
    "Lightning": ("/lightning/", "lightning_fabric", "lightning_utilities"),
    "model": ("transformers/", "peft/", "torch/nn", "benchmarks/work"),
}
"""Whose code a function is, by part of its file or name, the first that fits; what is left is torch's operators."""
REST = "other operators"
FIRST = 5
"""Steps before the profile starts."""


def run(options: Options) -> Iterator[list[Row]]:
    """Two ranks, the nano model in full, one engine after the other."""
    size, steps = ("tiny", FIRST + 3) if options.smallest else ("nano", FIRST + 60)
    for engine in options.chosen(ENGINES[1:3] if options.smallest else ENGINES):
        work = Work(size=size, tokens=32, steps=steps)
        row = {"case": engine, "model": size, **launch(2, profile, work, engine)[0]}
        shares = ", ".join(f"{owner} {us:.0f}" for owner, us in row["us_per_step"].items())
        print(
            f"{engine:<16} {sum(row['us_per_step'].values()):8.0f} us a step under the profiler: {shares}", flush=True
        )
        yield [row]


class Loader:
    """The loader of one engine alone, with a profiler around the later steps."""

    def __init__(self, work: Work, batches: Any) -> None:
        self._work, self._batches = work, batches
        self.profiler = cProfile.Profile()
        self.collectives: dict[str, int] = {}
        self.parts: Any = None
        self.measured = type("Measured", (), {"facts": {}})

    def __len__(self) -> int:
        return self._work.steps

    def record(self, loss: Any) -> None:
        """Losses are compared elsewhere."""

    def __iter__(self) -> Iterator[Any]:
        from lightning_shard.testing import count_collectives

        for index, batch in enumerate(self._batches):
            if index == FIRST:
                self.profiler.enable()
            if index == self._work.steps - 1:
                self.profiler.disable()
            if index == 2:
                with count_collectives() as counted:
                    yield batch
                self.collectives = dict(counted.counts)
            else:
                yield batch


def profile(work: Work, engine: str) -> dict[str, Any]:
    """Microseconds of a step by owner, and collectives by kind."""
    import torch.distributed as dist

    from benchmarks.engines import engines
    from benchmarks.work import batches

    loader = Loader(work, batches(work, dist.get_rank()))
    engines(work, [engine])[engine](loader)  # type: ignore[arg-type]
    steps = work.steps - 1 - FIRST
    by_owner = dict.fromkeys((*OWNERS, REST), 0.0)
    stats: Any = pstats.Stats(loader.profiler)
    for (file, _, name), (_, _, own_s, _, _) in stats.stats.items():
        by_owner[_owner(Path(file).as_posix(), name)] += 1e6 * own_s / steps
    return {"us_per_step": by_owner, "collectives": loader.collectives}


def _owner(file: str, name: str) -> str:
    return next((owner for owner, parts in OWNERS.items() if any(part in file or part in name for part in parts)), REST)


def tables(rows: list[Row]) -> list[str]:
    owners = [*OWNERS, REST]
    body = []
    for row in rows:
        calls = ", ".join(f"{n} {kind.replace('_', '-')}" for kind, n in sorted(row["collectives"].items())) or "none"
        body.append([row["case"], *(f"{row['us_per_step'][owner]:,.0f}" for owner in owners), calls])
    return [
        f"Two ranks, {rows[0]['model']} model, microseconds of a step under the profiler by whose code ran, and collectives:",
        table(["engine", *owners, "collectives a step"], body),
    ]
