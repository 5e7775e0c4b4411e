"""Activation checkpointing changes memory, not numbers."""

from functools import partial
from typing import Any

import pytest
import torch
from helpers.checkered import checkered
from helpers.llama import NUM_BLOCKS, TinyLlama, Training, make_llama, make_tokens
from torch import Tensor

from lightning_shard import FSDP2Strategy, Plan, lora
from lightning_shard.parallelize import parallelize
from lightning_shard.specs import find_precision
from lightning_shard.testing import RunResult, assert_parity, run_ranks, run_trainer

PLANS: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 2},
    "fsdp2": {"dp_shard": 2},
    "half-resident": {"dp_shard": 2, "adapters": "replicated", "resident_blocks": 2},
}


def run(num_ranks: int, plan: Plan, training: Training, precision: str) -> list[RunResult]:
    make = partial(TinyLlama, training)
    strategy = partial(FSDP2Strategy, plan)
    return run_ranks(num_ranks, run_trainer, make, make_tokens, strategy=strategy, precision=precision, max_steps=3)


@pytest.mark.parametrize(
    *checkered(layout=PLANS, kind=["full", "selective"], training=["lora", "full"], precision=["32-true", "bf16-true"])
)
def test_recomputing_keeps_the_numbers(layout: str, kind: Any, training: Training, precision: str) -> None:
    plain = run(2, Plan(**PLANS[layout]), training, precision)[0]
    plan = Plan(**PLANS[layout], activation_checkpoint=kind, activation_checkpoint_blocks=2)
    assert_parity(run(2, plan, training, precision)[0], plain, rtol=1e-6)


def saved_bytes(activation_checkpoint: Any, num_blocks: int | None = None) -> tuple[int, float]:
    """Bytes that autograd keeps for backward, and the loss, of one step with dropout."""
    module = torch.nn.Module()
    module.model = lora(make_llama(attention_dropout=0.3), r=4, lora_dropout=0.3, seed=1).train()
    plan = Plan(activation_checkpoint=activation_checkpoint, activation_checkpoint_blocks=num_blocks)
    parallelize(module, plan, precision=find_precision("32-true"), device=torch.device("cpu"))
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.arange(48).view(4, 12) % 64
    torch.manual_seed(3)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module.model(input_ids=tokens, labels=tokens).loss
    num_bytes = sum(kept.values())
    loss.backward()
    return num_bytes, torch.stack([p.grad.norm() for p in module.parameters() if p.grad is not None]).norm().item()


def test_dropout_masks_are_reproduced_and_memory_falls_with_every_block() -> None:
    plain_bytes, plain_norm = saved_bytes("none")
    kept = [plain_bytes]
    for num_blocks in range(1, NUM_BLOCKS + 1):
        num_bytes, norm = saved_bytes("full", num_blocks)
        assert norm == plain_norm
        kept.append(num_bytes)
    assert kept == sorted(set(kept), reverse=True)


def test_a_key_value_cache_is_not_filled_twice() -> None:
    model = make_llama(use_cache=True)
    plan = Plan(activation_checkpoint="full")
    parallelize(model, plan, precision=find_precision("32-true"), device=torch.device("cpu"))
    tokens = torch.arange(12)[None]
    model(input_ids=tokens, labels=tokens, use_cache=True).loss.backward()
