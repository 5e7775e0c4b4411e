"""Architecture facts from a transformers config, by reading attributes only."""

from typing import Any

from lightning_shard.specs.architecture import Architecture, ModelKind

# Facts the config does not carry: how transformers writes the family's block.
_LLAMA = {"norm": "rms", "gated_mlp": True}
_GEMMA = {"norm": "rms-fp32", "gated_mlp": True}
_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "ministral": _LLAMA,
    "qwen2": _LLAMA,
    "granite": _LLAMA,
    "smollm3": _LLAMA,
    "qwen3": {**_LLAMA, "qk_norm": "head"},
    "olmo2": {**_LLAMA, "norm": "rms-fp32", "norm_placement": "branch", "qk_norm": "whole"},
    "phi3": {**_LLAMA, "fused_qkv": True, "rotary_joins": True},
    "gemma": _GEMMA,
    "gemma2": {**_GEMMA, "norm_placement": "both"},
    "gemma3_text": {**_GEMMA, "norm_placement": "both", "qk_norm": "head"},
    "mixtral": _LLAMA,
    "qwen3_moe": {**_LLAMA, "qk_norm": "head"},
    "stablelm": {"gated_mlp": True, "rotary_joins": True},
    "phi": {"parallel_block": True, "shared_norm": True, "rotary_joins": True},
    "gpt_neox": {"parallel_block": True, "fused_qkv": True, "rotary_joins": True},
    "gpt2": {"fused_qkv": True},
    "gpt_bigcode": {"fused_qkv": True},
    "bert": {"norm_placement": "post"},
    "modernbert": {"gated_mlp": True, "fused_qkv": True},
    "vit": {},
    "t5": {"norm": "rms-t5"},
}
_ALL_HEADS = ("bert", "gpt2", "gpt_neox", "modernbert", "t5", "vit")
"""Families without grouped key-value heads: a config may carry the number all the same."""
_KINDS: dict[str, ModelKind] = {"bert": "encoder", "modernbert": "encoder", "vit": "vision", "t5": "encoder-decoder"}


def read_architecture(config: Any) -> Architecture | None:
    """The facts of a config, or None when it has no hidden size and layers to read."""
    config = _text_part(config)
    family = str(getattr(config, "model_type", "unknown"))
    hidden, layers = _int(config, "hidden_size"), _int(config, "num_hidden_layers", "num_layers")
    if not hidden or not layers:
        return None
    known = dict(_FAMILIES.get(family, {}))
    if family == "gpt_neox" and not getattr(config, "use_parallel_residual", True):
        known["parallel_block"] = False
    if family == "t5":
        known["gated_mlp"] = bool(getattr(config, "is_gated_act", False))
    heads = _int(config, "num_attention_heads", "num_heads") or 1
    head_dim = _int(config, "head_dim", "d_kv") or hidden // heads
    return Architecture(
        family=family,
        kind=_KINDS.get(family, "causal-lm"),
        hidden=hidden,
        num_layers=layers,
        heads=heads,
        kv_heads=_kv_heads(config, family, heads),
        head_dim=head_dim,
        ffn=_int(config, "intermediate_size", "n_inner", "ffn_dim", "d_ff") or 4 * hidden,
        vocab=0 if family == "vit" else _int(config, "vocab_size"),
        max_positions=_positions(config),
        activation=str(
            _first(config, "hidden_act", "hidden_activation", "activation_function", "dense_act_fn") or "gelu"
        ),
        rotary_dim=_rotary_dim(config, head_dim),
        logit_softcap=_first(config, "final_logit_softcapping"),
        attention_softcap=_first(config, "attn_logit_softcapping"),
        sliding_window=_first(config, "sliding_window"),
        dropout=float(_first(config, "hidden_dropout_prob", "resid_pdrop", "hidden_dropout", "dropout_rate") or 0.0),
        attention_dropout=float(
            _first(config, "attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "dropout_rate") or 0.0
        ),
        decoder_layers=_int(config, "num_decoder_layers") if _KINDS.get(family) == "encoder-decoder" else 0,
        tokens_per_sample=_image_tokens(config) if family == "vit" else None,
        attention=_implementation(config),
        **_experts(config),
        **known,
    )


def _text_part(config: Any) -> Any:
    text = getattr(config, "text_config", None)
    return config if text is None else text


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _int(config: Any, *names: str) -> int:
    value = _first(config, *names)
    return int(value) if isinstance(value, (int, float)) else 0


def _kv_heads(config: Any, family: str, heads: int) -> int:
    if family == "gpt_bigcode" and getattr(config, "multi_query", False):
        return 1
    if family in _ALL_HEADS:
        return heads
    return _int(config, "num_key_value_heads") or heads


def _positions(config: Any) -> int | None:
    """Longest sequence, where the family has one: T5's positions are relative, ViT's are patches."""
    if str(getattr(config, "model_type", "")) in ("t5", "vit"):
        return None
    positions = _int(config, "max_position_embeddings", "n_positions")
    return positions if positions > 0 else None


def _rotary_dim(config: Any, head_dim: int) -> int:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    theta = getattr(config, "rope_theta", None)
    if not parameters and theta is None:
        return 0
    share = _first(config, "partial_rotary_factor", "rotary_pct")
    if share is None and isinstance(parameters, dict):
        share = parameters.get("partial_rotary_factor")
    return int(head_dim * float(1.0 if share is None else share))


def _image_tokens(config: Any) -> int:
    """Patches of one image and the class token."""
    per_side = _int(config, "image_size") // max(1, _int(config, "patch_size"))
    return per_side * per_side + 1


def _implementation(config: Any) -> str | None:
    value = getattr(config, "_attn_implementation", None)
    return value if isinstance(value, str) else None


def _experts(config: Any) -> dict[str, Any]:
    experts = _int(config, "num_local_experts", "num_experts", "n_routed_experts")
    if not experts:
        return {}
    return {
        "experts": experts,
        "experts_per_token": _int(config, "num_experts_per_tok") or 1,
        "expert_ffn": _int(config, "moe_intermediate_size", "intermediate_size"),
        "shared_expert_ffn": _int(config, "shared_expert_intermediate_size"),
    }
