"""16-mixed: one decision of the gradient scaler on all ranks, under every layout; types with one meaning."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.regression import Regression, make_vectors
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from lightning_shard import FSDP2Strategy, TunedDDPStrategy
from lightning_shard.testing import assert_parity, run_ranks, run_trainer
from lightning_shard.testing.parity import QUIET, trained_parameters

LAYOUTS: dict[str, Any] = {
    "ddp": TunedDDPStrategy,
    "fsdp2": FSDP2Strategy,
    "replicated": partial(FSDP2Strategy, adapters="replicated"),
    "hsdp": partial(FSDP2Strategy, dp_shard=2),
}


class Overflows(Regression):
    """In its second step the gradient of one row of one weight overflows, which one rank alone holds."""

    def __init__(self) -> None:
        super().__init__(lr=0.01)
        self.net[0][1].norm.requires_grad_(False)

    def on_after_backward(self) -> None:
        if self.global_step == 1 and self.trainer.global_rank == dist.get_world_size() - 1:
            grad = self.net[1].weight.grad
            local = grad.to_local() if hasattr(grad, "to_local") else grad
            if local.numel():
                local.view(-1)[0] = torch.inf


def scaled(strategy: Any) -> tuple[list[float], Any]:
    from lightning.pytorch import Trainer

    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    trainer = Trainer(**QUIET, strategy=strategy(), devices=dist.get_world_size(), plugins=[plugin], max_steps=3)
    module = Overflows()
    trainer.fit(module, make_vectors(dist.get_rank(), dist.get_world_size()))
    scaler: Any = trainer.precision_plugin
    return [scaler.scaler.get_scale()], trained_parameters(module)


@pytest.mark.parametrize("layout", ["fsdp2", "replicated", pytest.param("hsdp", marks=pytest.mark.slow)])
def test_all_ranks_skip_the_step_in_which_one_overflows(layout: str) -> None:
    ranks = run_ranks(4 if layout == "hsdp" else 2, scaled, LAYOUTS[layout])
    for scales, parameters in ranks:
        assert scales == [512.0]  # halved once
        for name, value in parameters.items():
            assert torch.isfinite(value).all()
            assert torch.equal(value, ranks[0][1][name])


class Half(Regression):
    """Loaded in bf16 and run at 32-true: computes in the type it was loaded in, with FP32 masters."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__(lr=0.01)
        self.to(torch.bfloat16)
        self.net[0][:2].requires_grad_(not frozen)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        inputs, targets = batch
        output = self(inputs.to(torch.bfloat16))
        assert output.dtype == torch.bfloat16
        return nn.functional.mse_loss(output.float(), targets)


@pytest.mark.parametrize("frozen", [False, True], ids=["full", "partly-frozen"])
def test_a_model_loaded_in_bf16_means_the_same_under_every_layout(frozen: bool) -> None:
    make = partial(Half, frozen=frozen)
    expected, *_ = run_ranks(2, run_trainer, make, make_vectors, strategy="tuned-ddp", max_steps=4)
    assert {value.dtype for value in expected.parameters.values()} == {torch.float32}
    for layout in ("fsdp2", "replicated"):
        for result in run_ranks(2, run_trainer, make, make_vectors, strategy=LAYOUTS[layout], max_steps=4):
            assert_parity(result, expected)


class Doubled(Regression):
    """Buffers are widened with the weights, as Lightning does on one device."""

    def __init__(self) -> None:
        super().__init__(lr=0.01)
        self.register_buffer("rates", torch.tensor([1.0, 0.1, 0.01, 0.001234567, 1.0, 0.1, 0.01, 0.001]))

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.rates, Tensor)
        assert self.rates.dtype == torch.float64
        return super().forward(x * self.rates)


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_64_true_widens_buffers_too(layout: str) -> None:
    options = {"precision": "64-true", "max_steps": 3}
    (expected,) = run_ranks(1, run_trainer, Doubled, make_vectors, **options)
    for result in run_ranks(2, run_trainer, Doubled, make_vectors, strategy=LAYOUTS[layout], **options):
        assert_parity(result, expected, rtol=1e-12)


class Normed(Regression):
    """Batch statistics: saved buffers that training changes."""

    def __init__(self) -> None:
        super().__init__(lr=0.01)
        torch.manual_seed(4)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(3)]
        self.net = nn.Sequential(nn.Sequential(*blocks), nn.Linear(8, 1))


def statistics(strategy: Any, accumulate: int) -> dict[str, Tensor]:
    module = Normed()
    run_trainer(lambda: module, make_vectors, strategy=strategy, max_epochs=2, accumulate_grad_batches=accumulate)
    parameters = trained_parameters(module)
    return {**parameters, **{name: buffer.clone() for name, buffer in module.named_buffers()}}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_batch_statistics_are_rank_0s_as_under_ddp(accumulate: int) -> None:
    expected, _ = run_ranks(2, statistics, TunedDDPStrategy, accumulate)
    for seen in run_ranks(2, statistics, FSDP2Strategy, accumulate):
        torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-6)
