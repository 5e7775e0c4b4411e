"""A simulation in the planner's terms, so that both can be printed side by side."""

import dataclasses

from lightning_shard.memory import Estimate
from lightning_shard.memory.overheads import CONTEXT_BYTES
from lightning_shard.simulate.result import Simulation

TERMS: dict[str, tuple[str, ...]] = {
    "gathered_weights": ("gathered_weights", "gather_buffers"),
    "buffers": ("buffers", "batch"),
    "activations": ("activations", "logits_and_loss", "backward", "activation_gradients", "weight_gradients"),
}
"""Groups of kinds and of analytic terms that hold the same bytes; every other name means the same in both."""


def as_estimate(simulation: Simulation, analytic: Estimate) -> Estimate:
    """The analytic estimate of the same plan with its memory replaced by what the simulation counted.

    Time and the peak of loading stay analytic.
    """
    overheads = {
        "allocator_slack": simulation.reserved_bytes - simulation.allocated_bytes,
        "device_context": CONTEXT_BYTES,
        "collective_buffers": simulation.device_bytes - simulation.reserved_bytes - CONTEXT_BYTES,
    }
    terms = {name: size for name, size in {**simulation.kinds, **overheads}.items() if size}
    return dataclasses.replace(
        analytic,
        allocated_bytes=simulation.allocated_bytes,
        reserved_bytes=simulation.reserved_bytes,
        device_bytes=simulation.device_bytes,
        peak_at=simulation.peak_at,
        terms=terms,
        moments={moment.name: moment.allocated_bytes for moment in simulation.moments},
        method="simulated",
        not_modelled=simulation.not_modelled,
    )


def differences(simulation: Simulation, analytic: Estimate) -> dict[str, tuple[int, int]]:
    """Simulated and analytic bytes by term at each one's peak, terms that hold the same bytes grouped."""
    simulated, estimated = _grouped(simulation.kinds), _grouped(analytic.terms)
    for name in ("allocator_slack", "device_context", "collective_buffers"):
        estimated.pop(name, None)
    names = [*simulated, *(name for name in estimated if name not in simulated)]
    return {name: (simulated.get(name, 0), estimated.get(name, 0)) for name in names}


def _grouped(terms: dict[str, int]) -> dict[str, int]:
    group_of = {term: group for group, members in TERMS.items() for term in members}
    result: dict[str, int] = {}
    for term, size in terms.items():
        group = group_of.get(term, term)
        result[group] = result.get(group, 0) + size
    return {name: size for name, size in result.items() if size}
