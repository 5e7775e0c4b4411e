"""A decision whose plan has been simulated."""

import dataclasses

from lightning_shard.memory.terms import OVERHEADS
from lightning_shard.planner import Decision
from lightning_shard.simulate.estimate import as_estimate
from lightning_shard.simulate.result import Simulation
from lightning_shard.specs import format_bytes


def confirm(decision: Decision, simulation: Simulation) -> Decision:
    """The decision with its plan's memory as simulated; it fits only if that does."""
    estimate = as_estimate(simulation, decision.estimate)
    if "device_context" not in decision.estimate.terms:  # a host: neither context nor caching allocator
        terms = {name: size for name, size in estimate.terms.items() if name not in OVERHEADS}
        size = estimate.allocated_bytes
        estimate = dataclasses.replace(estimate, terms=terms, reserved_bytes=size, device_bytes=size)
    needs = max(estimate.device_bytes, estimate.load_device_bytes)
    short = max(0, needs - decision.limit_bytes)
    agreed = decision.fits == (short == 0)
    reason = decision.reason if agreed else (
        f"{decision.reason}; simulated it needs {format_bytes(needs)} of {format_bytes(decision.limit_bytes)} usable"
    )  # fmt: skip
    return dataclasses.replace(decision, estimate=estimate, fits=short == 0, shortfall_bytes=short, reason=reason)
