"""Models of the simulation grid, by hand-written sizes: built on meta, no weights and no network."""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)


def llama(hidden: int, ffn: int, blocks: int, heads: int, kv_heads: int, words: int, **more: Any) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=hidden,
            intermediate_size=ffn,
            num_hidden_layers=blocks,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            vocab_size=words,
            max_position_embeddings=131072,
            use_cache=False,
            **more,
        )
    )


def tiny() -> nn.Module:
    return llama(256, 768, 4, 8, 2, 2048)


def llama_1b() -> nn.Module:
    """Llama-3.2-1B."""
    return llama(2048, 8192, 16, 32, 8, 128256, tie_word_embeddings=True)


def llama_7b() -> nn.Module:
    """Llama-2-7B."""
    return llama(4096, 11008, 32, 32, 32, 32000)


def llama_8b() -> nn.Module:
    """Llama-3.1-8B."""
    return llama(4096, 14336, 32, 32, 8, 128256)


def llama_70b() -> nn.Module:
    """Llama-3.1-70B."""
    return llama(8192, 28672, 80, 64, 8, 128256)


def mistral_7b() -> nn.Module:
    """Mistral-7B-v0.1."""
    config = MistralConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        sliding_window=None,
        use_cache=False,
    )
    return MistralForCausalLM(config)


def qwen3() -> nn.Module:
    """Qwen3-0.6B."""
    config = Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return Qwen3ForCausalLM(config)


def mixtral() -> nn.Module:
    """A small mixture of experts: 8 blocks of 8 experts, 2 for each token."""
    config = MixtralConfig(
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=32000,
        num_local_experts=8,
        num_experts_per_tok=2,
        use_cache=False,
    )
    return MixtralForCausalLM(config)


GRID: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "tiny": (tiny, 512),
    "llama-1b": (llama_1b, 2048),
    "llama-8b": (llama_8b, 4096),
    "qwen3-0.6b": (qwen3, 2048),
    "mixtral-like": (mixtral, 2048),
}
"""Name to a function that builds the model, and the tokens of its sequence."""
