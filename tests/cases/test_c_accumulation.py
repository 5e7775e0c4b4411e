"""Accumulation, synchronisation and the scale of gradients (cases C1 and C3)."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.regression import WIDTH, Regression, make_vectors
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_shard import FSDP2Strategy
from lightning_shard.testing import ranks, run_ranks, run_trainer


class KeepGradients(Callback):
    def __init__(self) -> None:
        self.steps: list[dict[str, Tensor]] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        self.steps.append({name: full(p.grad) for name, p in module.named_parameters() if p.grad is not None})


def full(grad: Tensor) -> Tensor:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()


class OneLinear(Regression):
    def __init__(self) -> None:
        super().__init__(partial(nn.Linear, WIDTH, 1, bias=False), lr=0.0)

    def loss(self, batch: Any) -> Tensor:
        result: Tensor = self(batch[0]).mean()
        return result


@pytest.mark.parametrize("strategy", ["tuned-ddp", "fsdp2", "auto-shard"])
@ranks(2)
def test_c1_gradients_are_means_over_ranks_not_sums(strategy: str) -> None:
    keep = KeepGradients()
    run_trainer(OneLinear, make_vectors, strategy=strategy, callbacks=[keep], max_steps=1)
    mean = next(iter(make_vectors(0, 1)))[0].mean(dim=0, keepdim=True)
    (gradient,) = keep.steps[0].values()
    torch.testing.assert_close(gradient / mean, torch.ones_like(mean), rtol=1e-5, atol=0)


@ranks(2)
def test_c1_the_same_for_torch_itself_on_this_backend() -> None:
    from torch.distributed.fsdp import fully_shard

    linear = nn.Linear(2, 1, bias=False)
    fully_shard(linear)
    linear(torch.tensor([[1.0, 2.0]]) * (dist.get_rank() + 1)).sum().backward()
    grad = linear.weight.grad
    assert grad is not None
    assert full(grad).tolist() == [[1.5, 3.0]]


def accumulated_gradients(strategy: Any) -> list[dict[str, Tensor]]:
    keep = KeepGradients()
    run_trainer(Regression, make_vectors, strategy=strategy, callbacks=[keep], accumulate_grad_batches=4, max_epochs=2)
    return keep.steps


@pytest.mark.parametrize(
    "strategy",
    ["tuned-ddp", partial(FSDP2Strategy, defer_gradient_sync=True), partial(FSDP2Strategy, defer_gradient_sync=False)],
    ids=["ddp", "deferred", "every-batch"],
)
def test_c3_syncing_once_or_every_time_is_the_same(strategy: Any) -> None:
    (expected,) = run_ranks(1, accumulated_gradients, "auto")
    assert len(expected) == 2
    for steps in run_ranks(2, accumulated_gradients, strategy):
        for step, wanted in zip(steps, expected, strict=True):
            torch.testing.assert_close(step, wanted, rtol=0, atol=1e-5)
