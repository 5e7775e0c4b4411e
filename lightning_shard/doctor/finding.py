"""A finding, and one list of them for all ranks."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import override

Level = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something that a check found."""

    level: Level
    """An error would waste the run; a warning may."""
    check: str
    """Which check: a short name."""
    what: str
    why: str
    fix: str
    ranks: tuple[int, ...] = ()
    """Where it was found; empty for all."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**dataclasses.asdict(self), "ranks": list(self.ranks)}

    @override
    def __str__(self) -> str:
        where = f" (rank {', '.join(map(str, self.ranks))})" if self.ranks else ""
        return f"[{self.check}]{where} {self.what} {self.why} {self.fix}"


class DoctorError(RuntimeError):
    """Raised on every rank when something would waste the run."""

    def __init__(self, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        super().__init__("\n".join(["The run would be wasted:", *(f"- {finding}" for finding in self.findings)]))

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return DoctorError, (self.findings,)


def agree(findings: list[Finding]) -> list[Finding]:
    """What all ranks found, the same list everywhere. A collective where ranks are connected."""
    from lightning_shard.parallelize.together import gather

    return merge(gather(findings))


def merge(everyone: list[list[Finding]]) -> list[Finding]:
    """Equal findings of several ranks as one."""
    found: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(everyone):
        for finding in findings:
            found.setdefault(dataclasses.replace(finding, ranks=()), []).append(rank)
    all_ranks = len(everyone)
    return [
        finding if len(ranks) == all_ranks else dataclasses.replace(finding, ranks=tuple(ranks))
        for finding, ranks in found.items()
    ]
