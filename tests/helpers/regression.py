"""Small networks on small vectors, for faults that need no language model."""

from collections.abc import Callable, Sequence

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard.testing import GlobalBatchSampler

WIDTH = 8


class LoRALinear(nn.Module):
    """A frozen ``base`` with a trainable low-rank update, written out by hand."""

    def __init__(self, in_features: int, out_features: int, r: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(in_features, out_features).requires_grad_(False)
        self.A = nn.Linear(in_features, r, bias=False)
        self.B = nn.Linear(r, out_features, bias=False)
        nn.init.zeros_(self.B.weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.B(self.A(x))
        return result


class OddlyNamedBlock(nn.Module):
    """A residual block whose class name no list knows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return result


def tiny_lora_net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(LoRALinear(WIDTH, WIDTH), nn.ReLU(), LoRALinear(WIDTH, 1))


def block_net(num_blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Sequential(*(OddlyNamedBlock() for _ in range(num_blocks))), nn.Linear(WIDTH, 1))


class Regression(LightningModule):
    """Fits ``net`` to a fixed target by plain SGD or what ``optimizer`` makes."""

    def __init__(
        self,
        make_net: Callable[[], nn.Module] = block_net,
        *,
        lr: float = 0.1,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    ) -> None:
        super().__init__()
        self.net = make_net()
        self.lr = lr
        self.optimizer = optimizer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self(inputs), targets)

    def training_step(self, batch: Sequence[Tensor], _: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Sequence[Tensor], _: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Sequence[Tensor], index: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def make_vectors(rank: int, world_size: int, *, num_samples: int = 32) -> DataLoader[tuple[Tensor, ...]]:
    """This rank's part of global batches of 8 vectors with a target each."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(num_samples, WIDTH, generator=generator)
    dataset = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    return DataLoader(dataset, batch_sampler=GlobalBatchSampler(num_samples, 8, rank=rank, world_size=world_size))
