"""Tensor parallelism, alone and with sharding: one process's numbers, and clear refusals."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from helpers.llama import EPS, VOCABULARY, AdaptedVocabulary, TinyLlama, Training, make_llama, make_tokens
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Phi3Config, Phi3ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from lightning_shard import FSDP2Strategy, Plan, lora
from lightning_shard.adapters import lora_plus
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
    """Biases, and norms of queries and keys whose gradient every rank holds a part of; each rank's 33 rows of the
    vocabulary are shared unevenly, and one of them pads.
    """

    def _build(self) -> None:
        torch.manual_seed(1)
        config = Qwen3Config(
            vocab_size=66, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, attention_bias=True, use_cache=False, tie_word_embeddings=self.tied,
            pad_token_id=40,
        )  # fmt: skip
        self.model = self.adapted(Qwen3ForCausalLM(config))


class Halved(nn.Module):
    """A dropout that draws nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / 2


class HalvedQwen(TinyQwen):
    """Magnitudes beside biases; the adapters of every other layer read another input than the layer itself."""

    def _build(self) -> None:
        super()._build()
        layers = [layer for layer in self.model.modules() if getattr(layer, "lora_magnitude_vector", None)]
        for layer in layers[::2]:
            layer.lora_dropout["default"] = Halved()


class Plus(TinyLlama):
    """rsLoRA whose second matrices learn faster (LoRA+)."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(lora_plus(self, self.lr, ratio=4.0), eps=EPS)


def tokens_of_data_rank(tp: int, rank: int, world_size: int) -> Any:
    return make_tokens(rank // tp, world_size // tp)


def run(plan: Plan, make: Any) -> list[RunResult]:
    data = partial(tokens_of_data_rank, plan.tp)
    return run_ranks(plan.world_size, run_trainer, make, data, strategy=partial(FSDP2Strategy, plan), **OPTIONS)


@cache
def one_process(model: Any, training: Training) -> RunResult:
    return run_ranks(1, run_trainer, partial(model, training, tied=model is TinyLlama), make_tokens, **OPTIONS)[0]


MODELS: dict[str, tuple[Any, Training]] = {
    "tied": (TinyLlama, "full"),  # the embedding is the head as well
    "tied-lora": (TinyLlama, "lora"),
    "qwen": (TinyQwen, "full"),
    "qwen-lora": (TinyQwen, "lora"),
    "vocabulary-lora": (AdaptedVocabulary, "lora"),
    "vocabulary-saved": (AdaptedVocabulary, "full"),
    "vocabulary-dora": (AdaptedVocabulary, "dora"),
    "rslora-plus": (Plus, "rslora"),
    "qwen-dora": (HalvedQwen, "dora"),
}
PAIRS = {
    "tp": ["vocabulary-lora", "tied", "qwen-lora"],
    "tp-recomputing": ["vocabulary-saved", "qwen", "tied-lora", "qwen-dora"],
    "fsdp2-x-tp": ["qwen", "tied", "qwen-lora", "tied-lora", "vocabulary-lora", "vocabulary-saved", "vocabulary-dora"],
    "replicas-x-tp": ["rslora-plus", "qwen"],
}
BY_DEFAULT = {"tp": 1, "tp-recomputing": 1, "fsdp2-x-tp": 2}
"""So many of the first."""


@pytest.mark.parametrize(
    ("name", "model"),
    [
        pytest.param(name, model, marks=() if name in BY_DEFAULT and at < BY_DEFAULT[name] else pytest.mark.slow)
        for name, models in PAIRS.items()
        for at, model in enumerate(models)
    ],
)
def test_splitting_keeps_the_numbers(name: str, model: str) -> None:
    make, training = MODELS[model]
    for result in run(PLANS[name], partial(make, training, tied=make is TinyLlama)):
        assert_parity(result, one_process(make, training), rtol=1e-5)


@pytest.mark.parametrize(
    ("training", "sums"),
    [
        # Forward: attention's and the MLP's output. Backward: q, k, v, gate and up sum their input's gradient.
        ("full", 3 * (2 + 5)),
        # Besides: A of the two split rows forward, the input of B of the five split columns backward. The first
        # block's input has no gradient, so q, k and v of the frozen base sum none there.
        ("lora", 3 * (2 + 5 + 2 + 5) - 3),
        # And the squares of the two split rows' weights.
        ("dora", 3 * (2 + 5 + 2 + 5 + 2) - 3),
    ],
)
def test_what_travels(training: Training, sums: int) -> None:
    result = run_ranks(
        2, run_trainer, partial(TinyLlama, training), partial(tokens_of_data_rank, 2),
        strategy=partial(FSDP2Strategy, PLANS["tp"]), max_steps=2,
    )[0]  # fmt: skip
    ends = 2  # the embedding's output, and the gradient of the head's input
    assert result.collectives[1]["all_reduce"] == sums + ends
    assert result.collectives[1]["all_gather"] == 1
    assert result.collectives[1].num_bytes["all_gather"] == 4 * 8 * 12 * VOCABULARY


def with_embedding(layer: nn.Module) -> Any:
    model = make_llama(num_key_value_heads=4)
    model.set_input_embeddings(layer)
    return model


def with_head(layer: nn.Module) -> Any:
    model = make_llama(num_key_value_heads=4)
    layer.weight = model.lm_head.weight
    model.set_output_embeddings(layer)
    return model


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
            lambda: lora(make_llama(num_key_value_heads=4), r=4, target_modules=["q_proj"], alora_invocation_tokens=[1]),
            r"q_proj carries an adapter with ALoraLinearVariant, which tensor parallelism does not split",
        ),
        (
            lambda: lora(make_llama(num_key_value_heads=4), r=4, trainable_token_indices=[1, 2]),
            r"trainable_token_indices reads the embedding's whole table",
        ),
        (lambda: with_embedding(nn.Embedding(64, 32, max_norm=1.0)), r"is more than a look-up, which tp does not split"),
        (lambda: with_head(nn.Sequential(nn.Linear(32, 64))), r"is more than a linear layer, which tp does not split"),
    ],
)  # fmt: skip
def test_what_cannot_be_split_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TensorParallel(make(), FakeMesh())  # type: ignore[arg-type]
