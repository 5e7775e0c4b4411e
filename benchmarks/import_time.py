"""Seconds that ``import lightning_shard`` takes alone, and adds to ``import lightning``."""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.options import Options, Row
from benchmarks.report import table

STEPS = {
    "alone": ("import lightning_shard",),
    "after lightning": ("import lightning.pytorch", "import lightning_shard"),
    "before lightning": ("import lightning_shard", "import lightning.pytorch"),
    "all strategies": ("import lightning.pytorch", "from lightning_shard import AutoShardStrategy, FSDP2Strategy"),
}
"""Imports of one fresh interpreter, in order; each is timed."""
REPEATS = 3


def run(options: Options) -> Iterator[list[Row]]:
    """Fresh interpreters, in turn; the first of each, which reads from disk, is left out."""
    cases = list(STEPS)[:1] if options.smallest else options.chosen(STEPS)
    times: dict[str, list[list[float]]] = {case: [] for case in cases}
    for _ in range(1 + (1 if options.smallest else REPEATS)):
        for case in cases:
            times[case].append(_import(STEPS[case]))
    for case in cases:
        seconds = [statistics.median(column) for column in zip(*times[case][1:], strict=True)]
        print(case, ", ".join(f"{step}: {s:.3f} s" for step, s in zip(STEPS[case], seconds, strict=True)), flush=True)
        yield [{"case": case, "steps": list(STEPS[case]), "seconds": seconds}]


def _import(steps: tuple[str, ...]) -> list[float]:
    lines = ["import json, time", "times = [time.perf_counter()]"]
    for step in steps:
        lines += [step, "times.append(time.perf_counter())"]
    program = "\n".join([*lines, "print(json.dumps([b - a for a, b in zip(times, times[1:])]))"])
    run = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=Path(__file__).parent.parent
    )
    found: list[float] = json.loads(run.stdout.splitlines()[-1])
    return found


def tables(rows: list[Row]) -> list[str]:
    body = []
    for row in rows:
        for step, seconds in zip(row["steps"], row["seconds"], strict=True):
            body.append([f"{row['case']}: `{step}`", f"{seconds:.3f}"])
    return ["Fresh interpreters in turn, seconds of each import:", table(["imports", "median"], body)]
