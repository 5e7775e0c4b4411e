"""The parity helper agrees where runs agree and tells where they do not."""

from dataclasses import replace

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard.testing import GlobalBatchSampler, RunResult, assert_parity, run_ranks, run_trainer


class Regression(LightningModule):
    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.net[0].bias.requires_grad_(False)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def make_data(rank: int, world_size: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(2)
    dataset = TensorDataset(torch.randn(32, 4, generator=generator), torch.randn(32, 1, generator=generator))
    sampler = GlobalBatchSampler(len(dataset), 4, rank=rank, world_size=world_size)
    return DataLoader(dataset, batch_sampler=sampler)


def run(num_ranks: int, strategy: str, **options: object) -> list[RunResult]:
    return run_ranks(num_ranks, run_trainer, Regression, make_data, strategy=strategy, max_steps=4, **options)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_plain_ddp_has_parity(accumulate: int) -> None:
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    (expected,) = run(1, "auto", **options)
    results = run(2, "ddp", **options)
    assert len(expected.losses) == 4 * accumulate
    assert sorted(expected.parameters) == ["net.0.weight", "net.2.bias", "net.2.weight"]
    for actual in results:
        assert_parity(actual, expected)
        per_batch = [counted["all_reduce"] for counted in actual.collectives]
        assert per_batch == [0, 1] * 4 if accumulate == 2 else [1] * 4
    assert_parity(replace(expected), expected, rtol=0.0)


def test_accumulated_batches_have_the_loss_of_their_own() -> None:
    (plain,) = run_ranks(1, run_trainer, Regression, make_data, max_steps=1)
    (accumulated,) = run_ranks(1, run_trainer, Regression, make_data, max_steps=1, accumulate_grad_batches=2)
    assert plain.losses[0] == pytest.approx(accumulated.losses[0])


def test_what_differs_is_named() -> None:
    (expected,) = run(1, "auto")
    losses = (expected.losses[0] * 1.001, *expected.losses[1:])
    with pytest.raises(AssertionError, match="Loss of batch 0"):
        assert_parity(replace(expected, losses=losses), expected)
    with pytest.raises(AssertionError, match="3 batches were trained on, 4 were expected"):
        assert_parity(replace(expected, losses=losses[1:]), expected)
    moved = {name: value.clone() for name, value in expected.parameters.items()}
    moved["net.2.weight"][0, 3] += 1e-3
    with pytest.raises(AssertionError, match=r"1 of 3 parameters differ(?s:.*)net\.2\.weight"):
        assert_parity(replace(expected, parameters=moved), expected)
    fewer = {name: value for name, value in moved.items() if name != "net.2.bias"}
    with pytest.raises(AssertionError, match=r"Trained in one of the runs only: net\.2\.bias"):
        assert_parity(replace(expected, parameters=fewer), expected)


def test_slices_make_up_the_global_batch() -> None:
    whole = list(GlobalBatchSampler(10, 4, rank=0, world_size=1))
    parts = [list(GlobalBatchSampler(10, 4, rank=rank, world_size=2)) for rank in range(2)]
    assert whole == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [first + second for first, second in zip(*parts, strict=True)] == whole
    with pytest.raises(ValueError, match="global_batch_size=4 must be a multiple of world_size=3"):
        GlobalBatchSampler(10, 4, rank=0, world_size=3)
