"""Which groups are found, and whether all of them train (cases A9 and A10)."""

import logging
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from helpers.llama import TinyLlama, make_tokens
from helpers.regression import WIDTH, OddlyNamedBlock, Regression, block_net, make_vectors, tiny_lora_net
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_shard import lora
from lightning_shard.testing import ranks, run_trainer
from lightning_shard.testing.parity import trained_parameters

STRATEGIES = ["tuned-ddp", "fsdp2", "auto-shard"]


# --- A9: every adapter gets its gradient ------------------------------------------------------------------


class CountGradients(Callback):
    def __init__(self) -> None:
        self.shares: list[dict[str, float]] = []

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        self.shares.append({})
        for kind in ("lora_A", "lora_B"):
            grads = [full(p.grad) for name, p in module.named_parameters() if kind in name]
            self.shares[-1][kind] = sum(bool(grad.any()) for grad in grads) / len(grads)


def full(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


class CheckpointedLora(TinyLlama):
    def __init__(self) -> None:
        super().__init__("lora")
        self.model.enable_input_require_grads()
        self.model.gradient_checkpointing_enable({"use_reentrant": False})


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_a9_every_adapter_gets_its_gradient_under_recomputation(strategy: str) -> None:
    count = CountGradients()
    run_trainer(CheckpointedLora, make_tokens, strategy=strategy, callbacks=[count], max_steps=2)
    first, second = count.shares
    assert first["lora_B"] == 1.0
    assert second["lora_A"] == 1.0


# --- A10: blocks of unknown names -------------------------------------------------------------------------


class GroupsSeen(Callback):
    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        blocks = [part for part in module.modules() if isinstance(part, OddlyNamedBlock)]
        self.share = sum(isinstance(block, FSDPModule) for block in blocks) / len(blocks)


@pytest.mark.parametrize("wrap", ["plain", "lora", "compiled"])
@ranks(2)
def test_a10_every_repeated_block_has_a_group_of_its_own(wrap: str) -> None:
    def make() -> Regression:
        module = Regression(partial(block_net, 4))
        if wrap == "lora":
            module.net = lora(module.net, r=2, target_modules=["up", "down"])
        if wrap == "compiled":
            module.net.compile(backend="eager")
        return module

    seen = GroupsSeen()
    run_trainer(make, make_vectors, strategy="fsdp2", callbacks=[seen], max_steps=1)
    assert seen.share == 1.0


@ranks(2)
def test_a10_a_model_without_blocks_is_told_how_large_its_one_group_is() -> None:
    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    logging.getLogger("lightning_shard").addHandler(Keep())
    run_trainer(partial(Regression, partial(nn.Linear, WIDTH, 1)), make_vectors, strategy="fsdp2", max_steps=1)
    messages = [record.getMessage() for record in records if record.levelno == logging.WARNING]
    told = [message for message in messages if "No repeated blocks were found in Regression: all" in message]
    assert len(told) == (1 if dist.get_rank() == 0 else 0)
    assert all("MiB of parameters form one group" in message for message in told)


@ranks(2)
def test_the_tiny_lora_net_trains_its_adapters_only() -> None:
    base = tiny_lora_net()
    result = run_trainer(partial(Regression, tiny_lora_net), make_vectors, strategy="fsdp2", max_steps=2)
    assert sorted(result.parameters) == [f"net.{i}.{matrix}.weight" for i in (0, 2) for matrix in "AB"]
    assert trained_parameters(base).keys() == {name.removeprefix("net.") for name in result.parameters}
