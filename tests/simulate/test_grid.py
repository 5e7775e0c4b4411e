"""The simulation grid: closed form and simulated step over models, what trains, layouts, recomputing and precision.

``pytest -m slow -rP tests/simulate/test_grid.py`` prints the agreement table, with the terms that differ. Each cell is
one thread's work: ``-n 2`` works through them in two processes.
"""

import dataclasses

import pytest
import torch
from grid_models import GRID

from lightning_shard.hardware import Cluster, find_device, link_between_nodes, link_inside_node
from lightning_shard.memory import Estimate
from lightning_shard.planner import estimate
from lightning_shard.plans import Plan
from lightning_shard.simulate import Simulation, differences, simulate
from lightning_shard.specs import AdapterSpec, ModelSpec, TrainSpec

pytestmark = pytest.mark.slow
GIB = 2**30
WITHIN = 0.05
REFUSED = {("mixtral-like", "lora", "half", recompute, "bf16-mixed") for recompute in ("none", "full")}
"""Cells that the engine refuses: adapters of bare expert weights and the casts of resident FP32 weights both take the
parameter's place. The planner must not choose them."""


def plan_of(layout: str, num_blocks: int) -> Plan:
    return {
        "ddp": Plan(dp_replicate=8),
        "fsdp2": Plan(dp_shard=8),
        "half": Plan(dp_shard=8, resident_blocks=num_blocks // 2),
        "hsdp": Plan(dp_replicate=2, dp_shard=4),
    }[layout]


def cluster() -> Cluster:
    device = find_device("h100-sxm")
    assert device is not None
    inside, between = link_inside_node(device.intra_link), link_between_nodes(device.intra_link)
    return Cluster(devices_per_node=8, device=device, intra_link=inside, inter_link=between)


Cell = tuple[str, str, str, str, str]
"""Model, what trains, layout, recomputing, precision."""


def both(cell: Cell) -> tuple[Simulation, Estimate]:
    """A cell simulated, and in closed form."""
    name, training, layout, recompute, precision = cell
    build, seq_len = GRID[name]
    with torch.device("meta"):
        spec = ModelSpec.from_module(build(), name=name)
    plan = dataclasses.replace(plan_of(layout, spec.num_blocks), activation_checkpoint=recompute)  # type: ignore[arg-type]
    adapter = AdapterSpec(r=16) if training == "lora" else None
    train = TrainSpec(seq_len=seq_len, adapter=adapter, precision=precision)  # type: ignore[arg-type]
    return simulate(build, train, plan), estimate(spec, train, plan, cluster())


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "half", "hsdp"])
@pytest.mark.parametrize("training", ["full", "lora"])
@pytest.mark.parametrize("name", GRID)
def test_closed_form_and_simulation_agree(
    name: str, training: str, layout: str, recompute: str, precision: str
) -> None:
    cell = (name, training, layout, recompute, precision)
    if cell in REFUSED:
        with pytest.raises(ValueError, match="adapts the bare parameter"):
            both(cell)
        return
    simulated, analytic = both(cell)
    error = analytic.allocated_bytes / simulated.allocated_bytes - 1
    print(
        f"\n{name:13s} {training:4s} {layout:5s} {recompute:4s} {precision:10s} "
        f"simulated {simulated.allocated_bytes / GIB:8.3f} GiB at {simulated.peak_at!r}, "
        f"analytic {error:+7.2%} at {analytic.peak_at!r}, reserved "
        f"{analytic.reserved_bytes / simulated.reserved_bytes - 1:+7.2%}"
    )
    for term, (counted, computed) in differences(simulated, analytic).items():
        if abs(counted - computed) > 0.005 * simulated.allocated_bytes:
            print(f"    {term}: simulated {counted / GIB:.3f} GiB, analytic {computed / GIB:.3f} GiB")
    assert abs(error) < WITHIN
