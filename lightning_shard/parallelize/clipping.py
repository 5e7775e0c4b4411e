"""One gradient norm over plain and sharded gradients alike."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial


def clip_by_norm(parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scale all gradients together so that their norm is at most ``max_norm``; returns the norm before.

    The norm is that of the whole gradients: each rank measures its shards, one all-reduce per mesh adds
    them up, whole gradients are counted once. All ranks scale by the same factor.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    total = total_norm(grads, norm_type)
    scale_gradients(grads, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


def clip_by_value(parameters: Iterable[nn.Parameter], clip_value: float) -> None:
    """Clamp every gradient entry to [-clip_value, clip_value]."""
    for parameter in parameters:
        if parameter.grad is not None:
            local(parameter.grad).clamp_(-clip_value, clip_value)


def grad_norm(module: nn.Module, norm_type: float | str = 2.0, group_separator: str = "/") -> dict[str, Tensor]:
    """Each parameter's gradient norm and the total, as ``lightning.pytorch.utilities.grad_norm`` names them.

    For every layout: norms are those of whole gradients, the same on all ranks. All ranks must call it, after
    backward and before the step (``on_before_optimizer_step``).

    Raises:
        ValueError: when ``norm_type`` is not positive.
    """
    power = float(norm_type)
    if power <= 0:
        raise ValueError(f"norm_type={norm_type!r} must be above 0, or 'inf'.")
    grads = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    norms = {f"grad_{power}_norm{group_separator}{name}": total_norm([grad], power) for name, grad in grads.items()}
    if norms:
        norms[f"grad_{power}_norm_total"] = total_norm(list(grads.values()), power)
    return norms


def total_norm(grads: list[Tensor], norm_type: float = 2.0) -> Tensor:
    """The p-norm (p may be inf) of all gradients, plain and DTensor, as one plain FP32 scalar."""
    device = local(grads[0]).device if grads else torch.device("cpu")
    total = torch.zeros((), device=device)
    for group in _by_layout(grads).values():
        part = _local_power(group, norm_type).to(device)
        if isinstance(group[0], DTensor):
            _add_up(part, group[0], norm_type)
        total = torch.maximum(total, part) if norm_type == torch.inf else total + part
    return total if norm_type == torch.inf else total ** (1.0 / norm_type)


def scale_gradients(grads: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiply gradients in place by one factor, whatever their layout."""
    locals_ = [local(grad) for grad in grads]
    by_type: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in locals_:
        by_type.setdefault((grad.device, grad.dtype), []).append(grad)
    for (device, _), same in by_type.items():
        torch._foreach_mul_(same, factor.to(device) if isinstance(factor, Tensor) else factor)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor (the tensor itself when it is not sharded)."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _by_layout(grads: list[Tensor]) -> dict[object, list[Tensor]]:
    groups: dict[object, list[Tensor]] = {}
    for grad in grads:
        sharded_over: object = None
        if isinstance(grad, DTensor):
            if any(isinstance(placement, Partial) for placement in grad.placements):
                raise RuntimeError(
                    "A gradient has not been reduced yet (Partial placement): clip after backward has ended."
                )
            # Not is_shard(): the strided shards of FSDP over tensor parallelism deny being one.
            axes = tuple(i for i, placement in enumerate(grad.placements) if not placement.is_replicate())
            sharded_over = (grad.device_mesh, axes)
        groups.setdefault(sharded_over, []).append(grad)
    return groups


def _local_power(group: list[Tensor], norm_type: float) -> Tensor:
    parts = [part for grad in group if (part := local(grad)).numel()]  # a rank may hold an empty shard
    if not parts:
        return torch.zeros((), device=local(group[0]).device)
    dtype = torch.promote_types(parts[0].dtype, torch.float32)  # narrow gradients are summed in FP32
    norms = torch.stack([n.to(parts[0].device) for n in torch._foreach_norm(parts, norm_type, dtype=dtype)])
    return norms.max() if norm_type == torch.inf else (norms**norm_type).sum()


def _add_up(part: Tensor, like: DTensor, norm_type: float) -> None:
    operation = dist.ReduceOp.MAX if norm_type == torch.inf else dist.ReduceOp.SUM
    on_mesh = part.to(like.device_mesh.device_type)  # offloaded gradients are not where the group communicates
    for axis, placement in enumerate(like.placements):
        if not placement.is_replicate():
            dist.all_reduce(on_mesh, op=operation, group=like.device_mesh.get_group(axis))
    part.copy_(on_mesh)
