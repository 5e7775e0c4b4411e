"""A process group that says it is as large as the plan, for one process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_shard._compat import fake_process_group, forget_sharding, mesh_arithmetic, outside_modes
from lightning_shard.plans import Plan
from lightning_shard.simulate.patches import patched


@contextmanager
def fake_world(plan: Plan) -> Iterator[DeviceMesh | None]:
    """A fake process group of the plan's size, and the mesh a sharded plan needs; gone afterwards.

    A process group in use is set aside meanwhile.
    """
    if plan.world_size == 1 and not dist.is_initialized():
        yield None
        return
    (mesh, coordinates), (owner, name) = mesh_arithmetic()
    with (
        fake_process_group(plan.world_size),
        patched(mesh, coordinates, staticmethod(_first)),
        patched(owner, name, outside_modes(getattr(owner, name))),
    ):
        try:
            yield _make_mesh(plan)
        finally:
            forget_sharding()


def _first(ranks: Tensor, rank: int) -> tuple[int, ...]:
    """The place of rank 0 in a mesh it belongs to."""
    return (0,) * ranks.dim()


def require_no_group() -> None:
    """Raise RuntimeError when a process group is initialised: the fake one would take its place."""
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError(
            f"A process group of {dist.get_world_size()} ranks is initialised in this process, and a simulation needs "
            "its own. Simulate before the run starts, or call simulate_in_subprocess."
        )


def _make_mesh(plan: Plan) -> DeviceMesh | None:
    if plan.strategy == "ddp":
        return None
    axes = {"dp_shard": plan.dp_shard}
    if plan.dp_replicate > 1:
        axes = {"dp_replicate": plan.dp_replicate, **axes}
    if plan.tp > 1:
        axes = {**axes, "tp": plan.tp}
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
