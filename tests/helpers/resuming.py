"""A run with everything that a resume must restore: dropout, a shuffled loader, two parameter groups, a schedule."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from helpers.regression import WIDTH, LoRALinear
from lightning_shard import lora
from lightning_shard.testing.parity import QUIET

Kind = Literal["full", "lora", "by-hand"]


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.drop = nn.Dropout(dropout)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(self.drop(torch.tanh(self.up(x))))
        return result


class Resumable(LightningModule):
    """Trains blocks fully, or through adapters of peft or written by hand."""

    def __init__(self, kind: Kind = "full", dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        blocks = nn.Sequential(*(Block(dropout) for _ in range(3)))
        net = nn.Sequential(blocks, nn.Linear(WIDTH, 1))
        if kind == "lora":
            self.net: Any = lora(net, r=4, seed=3, target_modules=["up", "down"])
        elif kind == "by-hand":
            self.net = nn.Sequential(LoRALinear(WIDTH, WIDTH), nn.ReLU(), LoRALinear(WIDTH, 1))
        else:
            self.net = net

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        named = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        second = [p for name, p in named if "B" in name or "bias" in name]
        first = [p for name, p in named if not ("B" in name or "bias" in name)]
        optimizer = torch.optim.AdamW(
            [{"params": first, "lr": 1e-2}, {"params": second, "lr": 3e-2, "weight_decay": 0.1}], eps=1e-4
        )
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}]


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        loss = outputs["loss"].detach().double()
        if trainer.world_size > 1:
            dist.all_reduce(loss)
        self.losses.append(float(loss) / trainer.world_size)


def vectors(batches: int, batch_size: int, *, shuffle: bool) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(batches * batch_size, WIDTH, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size, shuffle=shuffle)


def losses_of(
    make_strategy: Callable[[], Any],
    kind: Kind,
    folder: Path,
    *,
    steps: int,
    save_at: int = 5,
    ckpt: Path | str | None = None,
    epoch: int = 8,
    dropout: float = 0.0,
    shuffle: bool = False,
    precision: Any = "32-true",
    seed: int = 11,
    more_callbacks: Sequence[Callback] = (),
    **trainer_options: Any,
) -> tuple[list[float], list[float]]:
    """Losses of the steps of this run (global batches of 12 vectors), and the learning rates at its end."""
    world_size = dist.get_world_size()
    seed_everything(seed, verbose=False)
    losses = Losses()
    saver = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=save_at, save_top_k=-1)
    trainer = Trainer(
        **{
            **QUIET,
            "enable_checkpointing": True,
            "use_distributed_sampler": True,
            "precision": precision,
            **trainer_options,
        },
        strategy=make_strategy(),
        devices=world_size,
        max_steps=steps,
        callbacks=[losses, saver, *more_callbacks],
    )
    loader = vectors(epoch * world_size, 12 // world_size, shuffle=shuffle)
    trainer.fit(Resumable(kind, dropout), loader, ckpt_path=ckpt)
    assert trainer.global_step == steps
    return losses.losses, [group["lr"] for group in trainer.optimizers[0].param_groups]
