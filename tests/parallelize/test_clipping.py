"""One norm over plain and sharded gradients."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_shard.parallelize.clipping import clip_by_norm, clip_by_value, local, total_norm
from lightning_shard.testing import ranks


def mixed_parameters() -> tuple[list[nn.Parameter], torch.Tensor]:
    """Parameters with gradients: plain, sharded evenly, unevenly, empty on some ranks, and replicated."""
    mesh = init_device_mesh("cpu", (2,))
    generator = torch.Generator().manual_seed(0)
    placements = [None, [Shard(0)], [Shard(0)], [Shard(1)], [Replicate()]]
    shapes = [(3, 2), (4, 2), (1, 2), (3, 4), (2, 2)]
    parameters, whole = [], []
    for shape, placement in zip(shapes, placements, strict=True):
        gradient = torch.randn(shape, generator=generator)
        whole.append(gradient.flatten())
        value = torch.zeros(shape)
        if placement is not None:
            value = distribute_tensor(value, mesh, placement)
            gradient = distribute_tensor(gradient, mesh, placement)
        parameter = nn.Parameter(value)
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters, torch.cat(whole)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@ranks(2)
def test_norm_is_that_of_the_whole_gradients(norm_type: float) -> None:
    parameters, whole = mixed_parameters()
    norm = total_norm([p.grad for p in parameters if p.grad is not None], norm_type)
    torch.testing.assert_close(norm, whole.norm(norm_type))


@ranks(2)
def test_all_gradients_shrink_by_one_factor() -> None:
    parameters, whole = mixed_parameters()
    before = [local(p.grad).clone() for p in parameters if p.grad is not None]
    norm = clip_by_norm(parameters, 0.5)
    torch.testing.assert_close(norm, whole.norm())
    for parameter, gradient in zip(parameters, before, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(local(parameter.grad), gradient * (0.5 / (norm + 1e-6)))


@ranks(2)
def test_small_gradients_are_left_alone() -> None:
    parameters, whole = mixed_parameters()
    clip_by_norm(parameters, 2 * whole.norm().item())
    torch.testing.assert_close(total_norm([p.grad for p in parameters if p.grad is not None]), whole.norm())


@ranks(2)
def test_values_are_clamped() -> None:
    parameters, _ = mixed_parameters()
    clip_by_value(parameters, 0.1)
    assert max(local(p.grad).abs().max() for p in parameters if p.grad is not None and local(p.grad).numel()) <= 0.1
