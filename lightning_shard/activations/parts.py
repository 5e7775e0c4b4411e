"""The parts of a transformer block and what each keeps, per token.

Derived from transformers' eager code and checked against what autograd really keeps (tests/planner). ``c``
is the bytes of a compute element. A tensor is named after what it is; sharing is by name.
"""

from lightning_shard.activations.tape import Setting, Tape
from lightning_shard.specs import Architecture

_COMPOSED_GELU = ("gelu_new", "gelu_fast", "quick_gelu")
_STATISTIC = 4
"""Bytes of one FP32 statistic per token (a reciprocal root, a mean, a log-sum-exp)."""


def norm(tape: Tape, arch: Architecture, setting: Setting, name: str, reads: str) -> None:
    """One normalisation over the hidden size; ``reads`` names its input."""
    c, h = setting.compute_bytes, arch.hidden
    if arch.norm == "layer":  # native_layer_norm: its input, mean and reciprocal deviation
        tape.keep(reads, c * h)
        tape.keep(f"{name} statistics", 2 * _STATISTIC)
        return
    _rms(tape, arch, setting, name, reads, width=h, heads=1)


def _rms(tape: Tape, arch: Architecture, setting: Setting, name: str, reads: str, *, width: int, heads: int) -> None:
    """Transformers' RMSNorm: the input in FP32, the root, and what the weight is multiplied with."""
    c = setting.compute_bytes
    tape.keep(f"{reads} in fp32", 4 * width)
    tape.keep(f"{name} root", _STATISTIC * heads)
    if arch.family == "t5" and c != 4:
        tape.keep(reads, c * width)
    if setting.norms_train:
        tape.keep(f"{name} normed", (4 if arch.norm == "rms-offset" else c) * width)


def attention(tape: Tape, arch: Architecture, setting: Setting, source: str = "attention") -> None:
    """Projections, rotation, scores and output projection of one attention."""
    c = setting.compute_bytes
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    inputs, outputs = ("cross_in", "cross_out") if source == "cross" else ("attention_in", "attention_out")
    tape.read_by_linears(inputs, arch.hidden, setting)  # type: ignore[arg-type]
    if arch.qk_norm:
        _rms(tape, arch, setting, f"{source} query norm", f"{source} raw query", width=q, heads=arch.heads)
        _rms(tape, arch, setting, f"{source} key norm", f"{source} raw key", width=kv, heads=arch.kv_heads)
    if arch.fused_qkv and arch.rotary_dim:  # the value is a view of the projection, which stays whole
        tape.keep(f"{source} projection", c * (q + kv))
    repeated = q if setting.eager else kv  # eager attention copies keys and values once per query head
    tape.keep(f"{source} query", c * q)
    tape.keep(f"{source} key", c * repeated)
    tape.keep(f"{source} value", c * repeated)
    if setting.eager:
        _scores(tape, arch, setting, source)
        tape.read_by_linears(outputs, q, setting)  # type: ignore[arg-type]
    else:
        tape.keep(outputs, c * q)  # the kernel's output, which the output projection reads
        tape.keep(f"{source} log-sum-exp", _STATISTIC * arch.heads)
        tape.read_by_linears(outputs, q, setting)  # type: ignore[arg-type]


def _scores(tape: Tape, arch: Architecture, setting: Setting, source: str) -> None:
    """Eager attention: softmax in FP32 and its cast, for every head and pair of positions."""
    pairs = arch.heads * setting.seq_len
    tape.keep(f"{source} softmax", 4 * pairs)
    if setting.compute_bytes != 4:
        tape.keep(f"{source} probabilities", setting.compute_bytes * pairs)
    if arch.attention_softcap:
        tape.keep(f"{source} softcap", setting.compute_bytes * pairs)
    if setting.attention_dropout:
        tape.keep(f"{source} dropped probabilities", setting.compute_bytes * pairs)
        tape.keep(f"{source} dropout mask", pairs)


def mlp(tape: Tape, arch: Architecture, setting: Setting, *, ffn: int, copies: float = 1.0, name: str = "mlp") -> None:
    """A gated or plain MLP; ``copies`` is how many rows each token has in it (experts per token)."""
    c = setting.compute_bytes
    tape.read_by_linears("mlp_in", arch.hidden, setting)
    if arch.gated_mlp:
        tape.keep(f"{name} gate", c * ffn * copies)
        tape.keep(f"{name} activated gate", c * ffn * copies)
        tape.keep(f"{name} up", c * ffn * copies)
        if arch.activation in _COMPOSED_GELU:
            tape.keep(f"{name} gelu parts", 3 * c * ffn * copies)
    elif arch.activation != "relu":  # relu keeps its output, which the next layer reads
        tape.keep(f"{name} up", c * ffn * copies)
        if arch.activation in _COMPOSED_GELU:
            tape.keep(f"{name} gelu parts", 3 * c * ffn * copies)
    else:
        tape.keep("mlp_mid", c * ffn * copies)
    if arch.kind == "encoder-decoder" and setting.training_dropout:
        tape.keep(f"{name} dropout mask", ffn)
    tape.read_by_linears("mlp_mid", ffn, setting)


def experts(tape: Tape, arch: Architecture, setting: Setting, *, trained: bool) -> None:
    """A mixture: each token goes through ``experts_per_token`` expert MLPs, and its rows are kept for each."""
    c, k = setting.compute_bytes, arch.experts_per_token
    tape.keep("router probabilities", 4 * arch.experts)
    if trained:
        tape.keep("expert inputs", c * arch.hidden * k)
        tape.keep("expert products", c * arch.expert_ffn * k)
    tape.keep("expert gate and up", 2 * c * arch.expert_ffn * k)
    tape.keep("expert activated gate", c * arch.expert_ffn * k)
    tape.keep("expert outputs", c * arch.hidden * k)
    if arch.shared_expert_ffn:
        mlp(tape, arch, setting, ffn=arch.shared_expert_ffn, name="shared expert")


def residual_dropout(tape: Tape, arch: Architecture, setting: Setting, name: str) -> None:
    """The mask of a dropout on the residual branch: one byte per element on accelerators."""
    if setting.training_dropout:
        tape.keep(f"{name} dropout mask", arch.hidden)
