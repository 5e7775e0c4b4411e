"""Sharding taken off again, so that another plan can be applied: never more than one unit is whole at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_shard._compat import forget_sharding
from lightning_shard._compat.sharded import fsdp_take_off
from lightning_shard.parallelize.storage import Place, is_packed, with_places
from lightning_shard.plans import Plan


def why_not_anew(module: nn.Module, plan: Plan) -> str | None:
    """Why a module laid out by ``plan`` cannot be laid out by another one in the run; None where it can."""
    if plan.strategy == "ddp":
        return None
    if plan.tp > 1:
        return "tensor parallelism replaced the forward of its layers"
    if plan.offload != "none":
        return "its shards wait in host memory"
    if plan.compile:
        return "its blocks were compiled over their shards"
    if any(is_packed(p.to_local() if isinstance(p, DTensor) else p) for p in module.parameters()):
        return "quantised weights can be put together from shards only by FSDP"
    return None


class Shards:
    """The shards of a module whose sharding is taken off, until they are put together again. A collective to use.

    Args:
        module: afterwards its parameters are shards that FSDP does not know.
        mesh: of the shape the shards were cut for, over process groups that are alive: theirs may be gone. None where
            the module is not to be laid out anew, and nothing waits.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh | None) -> None:
        self._mesh = mesh
        self._waiting: dict[nn.Parameter, Sequence[Place]] = {}
        if mesh is not None:
            fsdp_take_off(module)
            forget_sharding()  # it would serve a mesh that equals this one, and whose groups are gone
            self._waiting = {p: places for p, places in with_places(module) if isinstance(p, DTensor)}

    @torch.no_grad()
    def put_together(self, part: nn.Module) -> None:
        """Make every parameter in ``part`` whole that is still a shard."""
        inside = set(part.modules())
        for shard in [p for p, places in self._waiting.items() if any(owner in inside for owner, _ in places)]:
            places = self._waiting.pop(shard)
            parameter = nn.Parameter(whole(shard, self._mesh), requires_grad=shard.requires_grad)
            for owner, name in places:
                owner._parameters[name] = parameter


def whole(shard: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """What ``shard`` is a part of, gathered over ``mesh``; a plain tensor is whole already. A collective."""
    if mesh is None or not isinstance(shard, DTensor):
        return shard
    alive = DTensor.from_local(
        shard.to_local(), mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
    )
    return alive.full_tensor().contiguous()


def cut_like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The part of a whole ``tensor`` that belongs to this rank's part of ``parameter``."""
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)
