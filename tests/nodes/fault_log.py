"""One line of JSON per failure that was made to happen: what failed, and whether the run was lost."""

import datetime
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "LIGHTNING_SHARD_FAULT_LOG"
"""Names the file to append to; nothing is written where it is not set."""


@contextmanager
def one_try(kind: str, **facts: object) -> Iterator[dict[str, object]]:
    """Count the block as a try of ``kind``; the run is lost when it raises. What the block adds is logged with it."""
    line: dict[str, object] = {"what": "fault", "kind": kind, **facts}
    lost = 1
    try:
        yield line
        lost = 0
    finally:
        if VARIABLE in os.environ:
            line |= {"tries": 1, "runs_lost": lost, "date": datetime.date.today().isoformat()}
            with Path(os.environ[VARIABLE]).open("a") as log:
                log.write(json.dumps(line) + "\n")
