"""Tensor parallelism, alone and with sharding: one process's numbers, and clear refusals."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from helpers.checkered import checkered
from helpers.llama import TinyLlama, Training, make_llama, make_tokens
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Phi3Config, Phi3ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lightning_shard import FSDP2Strategy, Plan, lora
from lightning_shard.parallelize.tensor import TensorParallel
from lightning_shard.testing import RunResult, assert_parity, run_ranks, run_trainer

OPTIONS = {"max_steps": 4, "gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
PLANS = {
    "tp": Plan(tp=2),
    "tp-recomputing": Plan(tp=2, activation_checkpoint="full"),
    "fsdp2-x-tp": Plan(dp_shard=2, tp=2),
    "replicas-x-tp": Plan(dp_replicate=2, tp=2),
}


class TinyQwen(TinyLlama):
    """Biases, and norms of queries and keys whose gradient every rank holds a part of."""

    def _build(self) -> None:
        torch.manual_seed(1)
        config = Qwen3Config(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, attention_bias=True, use_cache=False, tie_word_embeddings=self.tied,
        )  # fmt: skip
        model = Qwen3ForCausalLM(config)
        self.model = lora(model, r=4, seed=7) if self.training_kind == "lora" else model


def tokens_of_data_rank(tp: int, rank: int, world_size: int) -> Any:
    return make_tokens(rank // tp, world_size // tp)


def run(plan: Plan, make: Any) -> list[RunResult]:
    data = partial(tokens_of_data_rank, plan.tp)
    return run_ranks(plan.world_size, run_trainer, make, data, strategy=partial(FSDP2Strategy, plan), **OPTIONS)


@cache
def one_process(model: Any, training: Training, tied: bool) -> RunResult:
    return run_ranks(1, run_trainer, partial(model, training, tied=tied), make_tokens, **OPTIONS)[0]


@pytest.mark.parametrize(*checkered(name=PLANS, model=[TinyLlama, TinyQwen], training=["lora", "full"]))
def test_splitting_keeps_the_numbers(name: str, model: Any, training: Training) -> None:
    tied = model is TinyLlama
    for result in run(PLANS[name], partial(model, training, tied=tied)):
        assert_parity(result, one_process(model, training, tied), rtol=2e-5)


@pytest.mark.parametrize(
    ("training", "sums"),
    [
        # Forward: attention's and the MLP's output. Backward: q, k, v, gate and up sum their input's gradient.
        ("full", 3 * (2 + 5)),
        # Besides: A of the two split rows forward, the input of B of the five split columns backward. The first
        # block's input has no gradient, so q, k and v of the frozen base sum none there.
        ("lora", 3 * (2 + 5 + 2 + 5) - 3),
    ],
)
def test_what_travels(training: Training, sums: int) -> None:
    result = run_ranks(
        2, run_trainer, partial(TinyLlama, training), partial(tokens_of_data_rank, 2),
        strategy=partial(FSDP2Strategy, PLANS["tp"]), max_steps=2,
    )[0]  # fmt: skip
    assert result.collectives[1]["all_reduce"] == sums
    assert result.collectives[1]["all_gather"] == 0


class FakeMesh:
    device_type = "cpu"

    def size(self) -> int:
        return 4


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_llama(), r"tp=4 does not divide the 2 key-value heads"),
        (lambda: nn.Linear(4, 4), r"Linear holds none. Use tp=1"),
        (lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=8)), r"holds none. Use tp=1"),
        (
            lambda: Phi3ForCausalLM(Phi3Config(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                                               num_attention_heads=4, num_key_value_heads=4, pad_token_id=0)),
            r"asks for colwise_gather_output, rowwise_split_input",
        ),
        (
            lambda: lora(make_llama(num_key_value_heads=4), method="dora", r=4, target_modules=["q_proj"]),
            r"q_proj carries DoRA",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TensorParallel(make(), FakeMesh())  # type: ignore[arg-type]
