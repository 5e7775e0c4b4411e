"""Training steps on one GPU with random weights, for memory, step time and MFU."""

import functools
import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from benchmarks.engines import BARE
from benchmarks.work import SEED, SIZES, llama_config
from lightning_shard import AutoShardStrategy, Plan, TrainSpec, lora


class Steps(Callback):
    """Seconds of every step, the device's work included; peaks are counted from the second step on."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        torch.cuda.synchronize()
        if len(self.times_s) == 1:
            torch.cuda.reset_peak_memory_stats()
        self._start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        torch.cuda.synchronize()
        self.times_s.append(time.perf_counter() - self._start)


class RandomLlama(LightningModule):
    """A Llama with random weights, made where it trains."""

    def __init__(self, size: str, train: TrainSpec) -> None:
        super().__init__()
        self.size, self.train_spec = size, train
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            with torch.device("meta"):
                model: Any = LlamaForCausalLM(llama_config(self.size, self.train_spec.seq_len))
                if self.train_spec.adapter is not None:
                    model = lora(model, r=self.train_spec.adapter.r, seed=SEED)
            self.model = model

    def training_step(self, tokens: Tensor, _: int) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        fused = self.train_spec.optimizer_implementation == "fused"
        return torch.optim.AdamW(trained, lr=1e-4, **({"fused": True} if fused else {"foreach": True}))


def fit_on_gpu(size: str, train: TrainSpec, plan: Plan, *, steps: int) -> list[float]:
    """Seconds of each step of a Trainer's run under ``plan``."""
    watch = Steps()
    make = functools.partial(torch.randint, 0, SIZES[size]["vocab_size"], (train.seq_len,))
    data: Any = DataLoader([make() for _ in range(steps * train.micro_batch_size)], batch_size=train.micro_batch_size)
    trainer = Trainer(
        strategy=AutoShardStrategy(plan=plan),
        accelerator="gpu",
        devices=1,
        precision=train.precision,  # type: ignore[arg-type]
        max_steps=steps,
        callbacks=[watch],
        **BARE,
    )
    trainer.fit(RandomLlama(size, train), data)
    return watch.times_s
