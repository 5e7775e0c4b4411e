"""Exact counts of published models of every family, from their configs' sizes alone."""

import json
from pathlib import Path
from typing import Any

import pytest
from hand_specs import cluster

from lightning_shard.memory.situation import make_situation
from lightning_shard.plans import Plan
from lightning_shard.specs import ModelSpec, TrainSpec
from lightning_shard.timing import compute_flops


def _sizes(family: str, model: str, hidden: int, ffn: int, layers: int, heads: int, words: int, **more: Any) -> Any:
    return {
        "model_type": family,
        "architectures": [model],
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": words,
        **more,
    }


_T5 = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "vocab_size": 32128}
_FEW = {"num_key_value_heads": 1, "head_dim": 256}
_MOE = {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8}
MODELS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "gemma-2b": (2_506_172_416, 18, _sizes("gemma", "GemmaForCausalLM", 2048, 16384, 18, 8, 256000, **_FEW)),
    "gemma-2-2b": (
        2_614_341_888,
        26,
        _sizes("gemma2", "Gemma2ForCausalLM", 2304, 9216, 26, 8, 256000, num_key_value_heads=4, head_dim=256),
    ),
    "gemma-3-1b": (999_885_952, 26, _sizes("gemma3_text", "Gemma3ForCausalLM", 1152, 6912, 26, 4, 262144, **_FEW)),
    "phi-2": (2_779_683_840, 32, _sizes("phi", "PhiForCausalLM", 2560, 10240, 32, 32, 51200)),
    "phi-3-mini": (
        3_821_079_552,
        32,
        _sizes("phi3", "Phi3ForCausalLM", 3072, 8192, 32, 32, 32064, tie_word_embeddings=False),
    ),
    "pythia-1b": (
        1_011_781_632,
        16,
        _sizes("gpt_neox", "GPTNeoXForCausalLM", 2048, 8192, 16, 8, 50304, tie_word_embeddings=False),
    ),
    "gpt-neox-20b": (
        20_554_567_680,
        44,
        _sizes("gpt_neox", "GPTNeoXForCausalLM", 6144, 24576, 44, 64, 50432, tie_word_embeddings=False),
    ),
    "qwen2.5-0.5b": (
        494_032_768,
        24,
        _sizes("qwen2", "Qwen2ForCausalLM", 896, 4864, 24, 14, 151936, num_key_value_heads=2, tie_word_embeddings=True),
    ),
    "qwen3-30b-a3b": (
        30_532_122_624,
        48,
        _sizes("qwen3_moe", "Qwen3MoeForCausalLM", 2048, 6144, 48, 32, 151936, moe_intermediate_size=768,
               tie_word_embeddings=False, **_MOE),
    ),
    "modernbert-base": (149_655_232, 22, _sizes("modernbert", "ModernBertForMaskedLM", 768, 1152, 22, 12, 50368)),
    "t5-base": (222_903_552, 24, {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], **_T5}),
}  # fmt: skip


def read(name: str, tmp_path: Path) -> ModelSpec:
    (tmp_path / "config.json").write_text(json.dumps(MODELS[name][2]))
    return ModelSpec.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_counts_are_exact(name: str, tmp_path: Path) -> None:
    spec = read(name, tmp_path)
    parameters, blocks, _ = MODELS[name]
    assert spec.num_parameters == parameters
    assert spec.num_blocks == blocks
    assert spec.warnings == ()


def test_a_token_meets_its_own_experts(tmp_path: Path) -> None:
    """Of 30.5 billion parameters 3.3 are active, 0.3 of them in the look-up that computes nothing."""
    situation = make_situation(
        read("qwen3-30b-a3b", tmp_path), TrainSpec(seq_len=1, precision="32-true"), Plan(), cluster(devices=1)
    )
    forward, _ = compute_flops(situation)
    assert forward / 2 == pytest.approx(3.04e9, rel=0.01)
