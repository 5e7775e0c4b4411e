"""The facts about a transformer that its shapes alone do not tell, for its activations."""

from dataclasses import dataclass
from typing import Literal

ModelKind = Literal["causal-lm", "encoder", "encoder-decoder", "vision"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """What decides how much a transformer block keeps for backward. Sizes are counts of elements."""

    family: str
    """transformers' ``model_type``; chooses the activation rules."""
    kind: ModelKind = "causal-lm"
    hidden: int
    num_layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int = 0
    """0 for models that predict no tokens."""
    max_positions: int | None = None
    """Longest sequence; None where positions are relative and unbounded."""
    gated_mlp: bool = False
    """Gate and up projections (SwiGLU, GeGLU), or one projection and an activation."""
    activation: str = "gelu"
    norm: Literal["rms", "rms-offset", "layer"] = "layer"
    """``rms-offset`` is Gemma's: FP32 throughout, multiplied by 1 + weight."""
    norms_per_block: int = 2
    parallel_block: bool = False
    """Attention and MLP read the same input (GPT-NeoX, Phi)."""
    qk_norm: bool = False
    rotary_dim: int = 0
    """Dimensions of each head that are rotated; 0 for none."""
    fused_qkv: bool = False
    """Query, key and value come from one projection and stay views of its output."""
    sliding_window: int | None = None
    logit_softcap: float | None = None
    attention_softcap: float | None = None
    experts: int = 0
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_expert_ffn: int = 0
    dropout: float = 0.0
    """Dropout on hidden states while training (residual and MLP outputs)."""
    attention_dropout: float = 0.0
    decoder_layers: int = 0
    """Decoder blocks of an encoder-decoder; ``num_layers`` counts its encoder's."""
    tokens_per_sample: int | None = None
    """Positions of one sample where the input fixes them (image patches)."""
    attention: str | None = None
    """The implementation the config asks for, where it says so."""
