"""Choose how to run: the grid of plans, what each needs, the one to take, and why the others were not taken."""

from lightning_shard.planner.calibration import Calibration, expected_step_s
from lightning_shard.planner.checklist import Answer
from lightning_shard.planner.choose import choose, estimate
from lightning_shard.planner.decision import Decision, Rejected, usable_bytes
from lightning_shard.planner.grid import PINNABLE, layouts, simplicity
from lightning_shard.planner.search import Search

__all__ = [
    "Answer",
    "PINNABLE",
    "Calibration",
    "Decision",
    "Rejected",
    "Search",
    "choose",
    "estimate",
    "expected_step_s",
    "layouts",
    "simplicity",
    "usable_bytes",
]
