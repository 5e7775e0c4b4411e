"""Gradient clipping and norms (cases B1 and B5)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from helpers.regression import Regression, block_net, make_vectors
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lightning_shard import FSDP2Strategy
from lightning_shard.parallelize.clipping import clip_by_norm
from lightning_shard.testing import assert_parity, ranks, run_ranks, run_trainer

SHARDED = partial(FSDP2Strategy, dp_shard=2)


# --- B1: sharded and whole gradients in one list ------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [1.0, 2.0, torch.inf])
@ranks(2)
def test_b1_one_norm_over_sharded_and_whole_gradients(norm_type: float) -> None:
    net = block_net(2)
    fully_shard(net[0][0])
    net(torch.ones(4, 8)).square().mean().backward()
    whole = [full(p.grad) for p in net.parameters()]
    expected = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in whole]), norm_type)
    assert expected > 0.1
    norm = clip_by_norm(net.parameters(), 0.1, norm_type)
    assert not isinstance(norm, DTensor)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
    for parameter, before in zip(net.parameters(), whole, strict=True):
        torch.testing.assert_close(full(parameter.grad), before * (0.1 / expected), rtol=1e-4, atol=1e-7)


def full(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()


class FirstBlockSharded(Regression):
    """Half sharded by the user, with the norm that Lightning's own logging would see."""

    def configure_model(self) -> None:
        if not isinstance(self.net[0][0], FSDPModule):
            fully_shard(self.net[0][0])


@pytest.mark.parametrize("strategy", ["tuned-ddp", "fsdp2"])
def test_b1_a_module_that_is_half_sharded_is_clipped_as_one(strategy: str) -> None:
    (expected,) = run_ranks(1, run_trainer, Regression, make_vectors, gradient_clip_val=0.05, max_steps=4)
    make = FirstBlockSharded if strategy == "fsdp2" else Regression
    for result in run_ranks(2, run_trainer, make, make_vectors, strategy=strategy, gradient_clip_val=0.05, max_steps=4):
        assert_parity(result, expected)


# --- B5: both algorithms, whatever the strategy --------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, partial(torch.optim.AdamW, eps=1e-4, fused=True)])
def test_b5_clipped_weights_are_those_of_ddp(algorithm: str, optimizer: Callable[..., Any]) -> None:
    clipping = {"gradient_clip_val": 0.5 if algorithm == "norm" else 0.02, "gradient_clip_algorithm": algorithm}
    make = partial(Regression, optimizer=optimizer, lr=0.01)
    replicated, *_ = run_ranks(2, run_trainer, make, make_vectors, strategy="ddp", max_steps=5, **clipping)
    unclipped, *_ = run_ranks(2, run_trainer, make, make_vectors, strategy="ddp", max_steps=5)
    with pytest.raises(AssertionError):
        assert_parity(unclipped, replicated)
    for strategy in ("tuned-ddp", "fsdp2", "auto-shard"):
        for result in run_ranks(2, run_trainer, make, make_vectors, strategy=strategy, max_steps=5, **clipping):
            assert_parity(result, replicated)


class ClipsByHand(Regression):
    """Overrides the hook that Lightning offers for it."""

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


def test_b5_clipping_in_the_modules_own_hook() -> None:
    (expected,) = run_ranks(1, run_trainer, ClipsByHand, make_vectors, max_steps=4)
    for strategy in ("tuned-ddp", "fsdp2"):
        for result in run_ranks(2, run_trainer, ClipsByHand, make_vectors, strategy=strategy, max_steps=4):
            assert_parity(result, expected)
