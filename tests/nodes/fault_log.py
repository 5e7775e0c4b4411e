"""Failures that were made to happen: what failed, how often it was tried, and how many runs were lost.

LIGHTNING_SHARD_FAULT_LOG=tries.jsonl python -m pytest -m slow tests/nodes      a line per try
python tests/nodes/fault_log.py tries.jsonl > benchmarks/results/nodes.jsonl    a line per kind of failure
"""

import datetime
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VARIABLE = "LIGHTNING_SHARD_FAULT_LOG"
"""Names the file to append tries to; nothing is written where it is not set."""


@contextmanager
def one_try(kind: str, **facts: object) -> Iterator[dict[str, object]]:
    """Count the block as a try of ``kind``; the run is lost when it raises. What the block adds is logged with it."""
    line: dict[str, object] = {"kind": kind, **facts}
    lost = 1
    try:
        yield line
        lost = 0
    finally:
        if VARIABLE in os.environ:
            line |= {"runs_lost": lost, "date": datetime.date.today().isoformat()}
            with Path(os.environ[VARIABLE]).open("a") as log:
                log.write(json.dumps(line) + "\n")


def summarise(tries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tries and runs lost of each kind of failure under each launcher and strategy."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for one in tries:
        groups.setdefault((one["kind"], one["launcher"], one.get("strategy", "auto-shard")), []).append(one)
    return [
        {
            "benchmark": "nodes",
            "case": f"{kind}; {launcher}; {strategy}",
            "device": "cpu",
            "kind": kind,
            "launcher": launcher,
            "strategy": strategy,
            "tries": len(those),
            "runs_lost": sum(one["runs_lost"] for one in those),
            "steps_repeated": max((one["steps_repeated"] for one in those if "steps_repeated" in one), default=None),
            "date": max(one["date"] for one in those),
        }
        for (kind, launcher, strategy), those in groups.items()
    ]


if __name__ == "__main__":
    lines = [json.loads(line) for file in sys.argv[1:] for line in Path(file).read_text().splitlines()]
    sys.stdout.write("".join(json.dumps(row) + "\n" for row in summarise(lines)))
