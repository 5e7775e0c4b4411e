"""Seconds that ``import lightning_shard`` adds, and that the commands take from their start."""

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.options import Options, Row
from benchmarks.report import table

PROGRAMS = {
    "python": "pass",
    "lightning_shard": "import lightning_shard",
    "lightning": "import lightning.pytorch",
    "lightning, then lightning_shard": "import lightning.pytorch, lightning_shard",
    "lightning_shard, then lightning": "import lightning_shard, lightning.pytorch",
    "lightning, then all strategies": "import lightning.pytorch; from lightning_shard import AutoShardStrategy, FSDP2Strategy",
}
REPEATS = 5


def run(options: Options) -> Iterator[list[Row]]:
    """Fresh interpreters, in turn."""
    repeats = 1 if options.smallest else REPEATS
    programs = dict(list(PROGRAMS.items())[:3]) if options.smallest else PROGRAMS
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(repeats + 1):
        for name, program in programs.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parent.parent)
            times[name].append(time.perf_counter() - start)
    rows = []
    for name, found in times.items():
        seconds = found[1:]  # the first reads from disk
        extra = {
            other: statistics.median(a - b for a, b in zip(seconds, times[other][1:], strict=True))
            for other in ("python", "lightning")
        }
        rows.append(
            {"case": name, "seconds": statistics.median(seconds), "worst_s": max(seconds), "more_s_than": extra}
        )
        print(f"{name:<40} {rows[-1]['seconds']:.3f} s, {extra['lightning']:+.3f} s over lightning")
    yield rows


def tables(rows: list[Row]) -> list[str]:
    body = [
        [f"`{PROGRAMS[row['case']]}`", f"{row['seconds']:.3f}", f"{row['worst_s']:.3f}", f"{row['more_s_than']['lightning']:+.3f}"]
        for row in rows
    ]  # fmt: skip
    return [
        "Fresh interpreters in turn, seconds from start to exit:",
        table(["program", "median", "worst", "over `lightning`"], body),
    ]
