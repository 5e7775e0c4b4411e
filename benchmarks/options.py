"""What every benchmark is told, and where it is found."""

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

Row = dict[str, Any]
"""One result: ``case`` names what was measured, the rest are figures."""

NAMES = (
    "memory_accuracy",
    "step_time",
    "step_profile",
    "residency",
    "plan_time",
    "import_time",
    "scaling",
    "load",
    "checkpoint_io",
)
"""Each is a module here with ``run(options)``, which yields the rows of a case at a time, and ``tables(rows) -> list[str]``."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to run a benchmark."""

    device: str = "cpu"
    smallest: bool = False
    simulate: bool = False
    link: str = "loopback"
    only: tuple[str, ...] = ()
    command: str = ""

    def wants(self, case: str) -> bool:
        """Whether a case was asked for; all of them by default."""
        return not self.only or any(text in case for text in self.only)

    def chosen(self, cases: Iterable[str]) -> list[str]:
        """The cases asked for; a text that is a case's whole name means that one alone.

        Raises:
            ValueError: when there is none.
        """
        every = list(cases)
        parts = [text for text in self.only if text not in every]
        found = [case for case in every if not self.only or case in self.only or any(text in case for text in parts)]
        if not found:
            raise ValueError(f"--only {' '.join(self.only)} matches no case. Cases: {', '.join(every)}.")
        return found


def load(name: str) -> ModuleType:
    """The benchmark of a name."""
    return importlib.import_module(f"benchmarks.{name}")
