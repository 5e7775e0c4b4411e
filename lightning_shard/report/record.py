"""The file of a run: plan, estimate, what was measured, and its history."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 2
FILE_NAME = "shard_monitor.json"
MOST_ROWS = 2000
"""Rows of history kept; beyond them every other one is dropped, so a file stays small however long the run."""


@dataclass(slots=True)
class RunRecord:
    """What ``lightning-shard plan --calibrate`` and ``lightning-shard report`` read."""

    run: dict[str, Any] = field(default_factory=dict)
    """Strategy, devices, precision."""
    plan: dict[str, Any] | None = None
    estimate: dict[str, Any] | None = None
    measured: dict[str, Any] = field(default_factory=dict)
    """Of the whole run; the largest or slowest of all ranks."""
    memory: list[list[Any]] = field(default_factory=list)
    """Rows (term, estimated bytes, measured bytes) of rank 0."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """The latest figures of each rank."""
    history: list[dict[str, Any]] = field(default_factory=list)
    """A row each time the run logged."""
    validation: list[dict[str, Any]] = field(default_factory=list)
    """Step and the metrics of each validation."""
    window: dict[str, Any] | None = None
    """The latest profiled step of rank 0."""

    def add(self, row: dict[str, Any]) -> None:
        """One more row of history."""
        self.history.append(row)
        if len(self.history) > MOST_ROWS:
            self.history = self.history[::2]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"format": FORMAT, **{name: getattr(self, name) for name in self.__dataclass_fields__}}

    def write(self, path: Path) -> None:
        """Write the file whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_name(f"{path.name}.part")
        aside.write_text(json.dumps(self.to_dict(), indent=1) + "\n")
        aside.replace(path)

    @classmethod
    def load(cls, path: str | Path) -> "RunRecord":
        """Read a file, or the one in a run's folder.

        Raises:
            ValueError: when there is none, or it is none of ShardMonitor's.
        """
        file = Path(path)
        if file.is_dir():
            file = file / FILE_NAME
        if not file.is_file():
            raise ValueError(
                f"{file} is no file of ShardMonitor: it is not there. Give the folder of a run that had ShardMonitor() among its callbacks (recipes have it), "
                "or the shard_monitor.json it wrote."
            )
        try:
            values = json.loads(file.read_text())
            if values["format"] != FORMAT:
                raise ValueError(f"format {values['format']}, this version reads {FORMAT}")
            return cls(**{name: values[name] for name in cls.__dataclass_fields__})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{file} is no file of ShardMonitor ({type(error).__name__}: {error}). Give the folder of a run that had "
                "ShardMonitor() among its callbacks (recipes have it), or the shard_monitor.json it wrote."
            ) from error
