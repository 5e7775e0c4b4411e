"""What adapters cost (case K7)."""

from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from helpers.llama import NUM_BLOCKS, TinyLlama, make_tokens
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_shard.testing import ranks, run_trainer


class GradientBytes(Callback):
    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        self.num_bytes = sum((g.to_local() if isinstance(g, DTensor) else g).nbytes for g in grads)
        self.groups_in_blocks = sum(
            isinstance(part, FSDPModule) for part in module.model.base_model.model.model.modules()
        )


@pytest.mark.parametrize("accumulate", [1, 2])
@ranks(2)
def test_k7_gradients_exist_for_adapters_only_and_no_adapter_has_a_group(accumulate: int) -> None:
    seen = GradientBytes()
    make = partial(TinyLlama, "lora")
    result = run_trainer(
        make, make_tokens, strategy="fsdp2", callbacks=[seen], max_steps=2, accumulate_grad_batches=accumulate
    )
    num_trained = sum(value.numel() for value in result.parameters.values())
    assert seen.num_bytes == 4 * num_trained // dist.get_world_size()
    assert seen.groups_in_blocks <= NUM_BLOCKS + 1  # the embedding has one
    block = sum(4 * p.numel() for p in make().model.base_model.model.model.layers[0].parameters())
    for step in result.collectives:
        assert step.calls.count(("all_gather", block)) == 2 * NUM_BLOCKS
        assert step["all_gather"] <= 2 * NUM_BLOCKS + 4
