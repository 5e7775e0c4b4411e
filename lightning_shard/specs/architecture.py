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
    norm: Literal["rms", "rms-fp32", "rms-t5", "layer"] = "layer"
    """``rms-fp32`` multiplies by its weight before it casts back (Gemma, OLMo 2); ``rms-t5`` casts only its
    variance up."""
    norm_placement: Literal["pre", "branch", "both", "post"] = "pre"
    """Before each branch, on each branch's output (OLMo 2), both (Gemma 2 and 3), or after each sum (BERT)."""
    shared_norm: bool = False
    """A parallel block with one norm for both branches (Phi)."""
    parallel_block: bool = False
    """Attention and MLP read the same input (GPT-NeoX, Phi)."""
    qk_norm: Literal["none", "head", "whole"] = "none"
    """Norm of queries and keys, per head or over all of them."""
    rotary_dim: int = 0
    """Dimensions of each head that are rotated; 0 for none."""
    rotary_joins: bool = False
    """Rotated and unrotated parts are joined into new queries; attention's output then has their layout and is
    copied for the output projection (GPT-NeoX, Phi, StableLM)."""
    fused_qkv: bool = False
    """Query, key and value come from one projection, so that what is not rotated stays a view of it (where no
    key-value cache copies it: training steps pass ``use_cache=False``)."""
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
