"""Tied weights (cases A5 and A6)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard.testing import GlobalBatchSampler, assert_parity, run_ranks, run_trainer

STRATEGIES = ["tuned-ddp", "fsdp2", "auto-shard"]


class TiedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        result: Tensor = self.head(x)
        return result


class TiedModule(LightningModule):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device_of_birth = device
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(1)
            with torch.device(self.device_of_birth):
                self.net = TiedNet()

    def training_step(self, batch: Sequence[Tensor], _: int) -> Tensor:
        (tokens,) = batch
        return nn.functional.cross_entropy(self.net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def on_train_end(self) -> None:
        assert self.net.head.weight is self.net.embed.weight

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def make_small_tokens(rank: int, world_size: int) -> DataLoader[tuple[Tensor, ...]]:
    dataset = TensorDataset(torch.randint(0, 16, (32, 6), generator=torch.Generator().manual_seed(2)))
    return DataLoader(dataset, batch_sampler=GlobalBatchSampler(32, 8, rank=rank, world_size=world_size))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a5_a_tied_head_trains_as_one_parameter(strategy: str) -> None:
    (expected,) = run_ranks(1, run_trainer, TiedModule, make_small_tokens, max_steps=3)
    assert "net.head.weight" not in expected.parameters
    for result in run_ranks(2, run_trainer, TiedModule, make_small_tokens, strategy=strategy, max_steps=3):
        assert_parity(result, expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a6_a_tie_survives_the_meta_device(strategy: str) -> None:
    make = partial(TiedModule, "meta")
    (expected,) = run_ranks(1, run_trainer, make, make_small_tokens, strategy="tuned-ddp", max_steps=3)
    for result in run_ranks(2, run_trainer, make, make_small_tokens, strategy=strategy, max_steps=3):
        assert_parity(result, expected)
