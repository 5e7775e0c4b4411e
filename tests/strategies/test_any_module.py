"""Modules of all shapes: whatever a LightningModule holds, the numbers are those of one process."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from helpers.checkered import checkered
from helpers.regression import WIDTH, OddlyNamedBlock, Regression, block_net, make_vectors
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_shard import AutoShardStrategy, TunedDDPStrategy
from lightning_shard.testing import RankError, assert_parity, run_ranks, run_trainer

STRATEGIES: dict[str, tuple[int, Any]] = {
    "ddp-2": (2, "tuned-ddp"),
    "fsdp2-2": (2, "fsdp2"),
    "fsdp2-4": (4, "fsdp2"),
    "auto-2": (2, "auto-shard"),
    "auto-sharded-2": (2, partial(AutoShardStrategy, pin={"dp_shard": 2})),
}


class Scaled(Regression):
    """Scalar, single-element and empty parameters beside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x) * self.scale + self.shift
        return result


class ScalarInBlocks(Regression):
    class Block(OddlyNamedBlock):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.gate

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net[0] = nn.Sequential(*(self.Block() for _ in range(3)))


class SameBlockTwice(Regression):
    """One block instance that runs twice, as ALBERT's does."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net[1](self.net[0](self.net[0](x)))
        return result


class ParametersInLists(LightningModule):
    """Parameters that belong to no layer with a forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / WIDTH for _ in range(3))
        self.named = nn.ParameterDict({"out": nn.Parameter(torch.randn(WIDTH, 1))})

    def training_step(self, batch: Sequence[Tensor], _: int) -> Tensor:
        x, targets = batch
        for weight in self.weights:
            x = torch.tanh(x @ weight)
        return nn.functional.mse_loss(x @ self.named["out"], targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Attentive(Regression):
    """torch's own encoder, whose attention reads its output layer's weight without calling it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.net = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x.unsqueeze(1)).squeeze(1)
        return result


class TwoOptimizers(Regression):
    """Manual optimization of two halves, one of them twice per batch, as in adversarial training."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.second = block_net(2)

    def training_step(self, batch: Sequence[Tensor], _: int) -> Tensor:
        inputs, targets = batch
        first, second = self.optimizers()  # type: ignore[misc]
        for optimizer, net in ((first, self.net), (second, self.second), (second, self.second)):
            loss = nn.functional.mse_loss(net(inputs), targets)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss.detach()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.net, self.second)]


class Scheduled(Regression):
    """Groups with rates of their own, and a schedule per step."""

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        plain = [p for p in self.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "lr": 0.05, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-4)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class PartlyFrozen(Regression):
    """The first blocks are frozen, the last ones train."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0][:2].requires_grad_(False)


MODULES = [SameBlockTwice, ParametersInLists, Attentive, Scheduled, PartlyFrozen]


def assert_module_keeps_its_numbers(make: Any, num_ranks: int, strategy: Any) -> None:
    options = {"max_epochs": 1, "limit_train_batches": 4}
    (expected,) = run_ranks(1, run_trainer, make, make_vectors, **options)
    for result in run_ranks(num_ranks, run_trainer, make, make_vectors, strategy=strategy, **options):
        assert_parity(result, expected)


@pytest.mark.parametrize(*checkered(strategy=STRATEGIES, make=MODULES))
def test_any_module_keeps_its_numbers(strategy: str, make: Any) -> None:
    assert_module_keeps_its_numbers(make, *STRATEGIES[strategy])


SHARDED = ["fsdp2-2", "fsdp2-4", "auto-sharded-2"]


@pytest.mark.parametrize("make", [Scaled, ScalarInBlocks])
@pytest.mark.parametrize("strategy", ["ddp-2", "auto-2", *SHARDED])
def test_scalars_keep_their_numbers(strategy: str, make: Any) -> None:
    assert_module_keeps_its_numbers(make, *STRATEGIES[strategy])


@pytest.mark.parametrize("strategy", [partial(TunedDDPStrategy, find_unused_parameters=True), "fsdp2"])
def test_two_optimizers_keep_their_numbers(strategy: Any) -> None:
    assert_module_keeps_its_numbers(TwoOptimizers, 2, strategy)


@pytest.mark.xfail(reason="with manual optimization the unused parameters are not named", strict=True)
def test_parameters_that_a_manual_backward_left_out_are_named() -> None:
    with pytest.raises(RankError, match=r"second\.0\.0\.norm\.weight"):
        run_ranks(2, run_trainer, TwoOptimizers, make_vectors, strategy="tuned-ddp", max_epochs=1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_last_accumulated_batches_of_an_epoch_count(strategy: str) -> None:
    num_ranks, how = STRATEGIES[strategy]
    options = {"max_epochs": 2, "limit_train_batches": 3, "accumulate_grad_batches": 2}
    (expected,) = run_ranks(1, run_trainer, Regression, make_vectors, **options)
    for result in run_ranks(num_ranks, run_trainer, Regression, make_vectors, strategy=how, **options):
        assert_parity(result, expected)


def make_compiled() -> LightningModule:
    compiled = torch.compile(Regression(), backend="eager")
    assert isinstance(compiled, nn.Module)
    return compiled  # type: ignore[return-value]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_compiled_module_keeps_its_numbers(strategy: str) -> None:
    num_ranks, how = STRATEGIES[strategy]
    (expected,) = run_ranks(1, run_trainer, Regression, make_vectors, max_steps=3)
    for result in run_ranks(num_ranks, run_trainer, make_compiled, make_vectors, strategy=how, max_steps=3):
        assert_parity(result, expected)
