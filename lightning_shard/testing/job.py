"""What travels between the caller, the rank server and the ranks. Standard library only."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One function to be called on several ranks."""

    num_ranks: int
    module: str
    """Name of the module the function is imported from."""
    source: str | None
    """File of that module, for modules that cannot be imported by name."""
    main_file: str | None
    """File of the caller's ``__main__``, for what was defined there."""
    qualname: str
    arguments: bytes
    """Pickled ``(args, kwargs)``."""
    timeout_s: float
    folder: Path
    """Where the ranks meet and leave results, failures, output and stacks."""
    working_directory: str
    environment: dict[str, str]
    search_path: list[str]

    def result_file(self, rank: int) -> Path:
        return self.folder / f"result-{rank}.pickle"

    def failure_file(self, rank: int) -> Path:
        return self.folder / f"failure-{rank}.pickle"

    def output_file(self, rank: int) -> Path:
        return self.folder / f"output-{rank}.txt"

    def stacks_file(self, rank: int) -> Path:
        return self.folder / f"stacks-{rank}.txt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An exception that a rank's body raised."""

    rank: int
    at_s: float
    """Time of the machine's monotonic clock, to find the first."""
    traceback: str
    error: bytes | None
    """The pickled exception, where it can be pickled."""
    skipped: str | None
    """The reason, where the body asked for its test to be skipped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """How the ranks of a job ended."""

    timed_out: bool
    first_failed: int | None
    """The rank that ended first with an exit code other than 0."""
    exit_code: int
    """Its exit code; minus the signal's number where one ended it."""
