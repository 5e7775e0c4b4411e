"""The parts of a transformer block and what each keeps, per token.

Derived from transformers' eager code and checked against what autograd really keeps (tests/planner). ``c``
is the bytes of a compute element. A tensor is named after what it is; sharing is by name.
"""

from lightning_shard.activations.linears import Input
from lightning_shard.activations.tape import Setting, Tape
from lightning_shard.specs import Architecture

_COMPOSED_GELU = ("gelu_new", "gelu_fast")
"""Written in Python as 0.5 x (1 + tanh(...)): four operands where a fused GELU keeps one."""
_STATISTIC = 4
"""Bytes of one FP32 statistic per token (a reciprocal root, a mean, a log-sum-exp)."""
_INDEX = 8


def norm(tape: Tape, arch: Architecture, setting: Setting, name: str, reads: str) -> None:
    """One normalisation over the hidden size; ``reads`` names its input."""
    if setting.compiled:
        _compiled_norm(tape, arch, setting, name, reads)
        return
    if arch.norm == "layer":  # native_layer_norm: its input, mean and reciprocal deviation
        tape.keep(reads, setting.stream_bytes * arch.hidden)
        tape.keep(f"{name} statistics", 2 * _STATISTIC)
        return
    _rms(tape, arch, setting, name, reads, width=arch.hidden, rows=1, c=setting.stream_bytes)


def _rms(
    tape: Tape, arch: Architecture, setting: Setting, name: str, reads: str, *, width: int, rows: int, c: int
) -> None:
    """RMSNorm as transformers writes it: of ``c``-byte elements it keeps the input in FP32, the root of each row, and
    what the weight is multiplied with.
    """
    tape.keep(f"{name} root", _STATISTIC * rows)
    if setting.compiled:
        tape.keep(reads, c * width)
        return
    tape.keep(reads if c == 4 else f"{reads} in fp32", 4 * width)
    if arch.norm == "rms-t5":
        tape.keep(reads, c * width)
    if setting.norms_train:
        tape.keep(f"{name} normed", (4 if arch.norm == "rms-fp32" else c) * width)


def _compiled_norm(tape: Tape, arch: Architecture, setting: Setting, name: str, reads: str) -> None:
    """A compiled norm keeps its rows' statistics and what its input can be made from again: of the sum of the block's
    input and the attention's branch, that branch, which a norm after it has kept already.
    """
    statistics = 2 if arch.norm == "layer" else 1
    tape.keep(f"{name} {'statistics' if statistics == 2 else 'root'}", statistics * _STATISTIC)
    if reads != "second residual":
        tape.keep(reads, setting.stream_bytes * arch.hidden)
    elif arch.norm_placement not in ("both", "branch"):
        tape.keep(reads, setting.compute_bytes * arch.hidden)


def attention(tape: Tape, arch: Architecture, setting: Setting, *, cross: bool = False) -> None:
    """Projections, rotation, scores and output projection of one attention."""
    name = "cross" if cross else "attention"
    inputs: Input = "cross_in" if cross else "attention_in"
    outputs: Input = "cross_out" if cross else "attention_out"
    c = setting.compute_bytes
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    tape.read_by_linears(inputs, arch.hidden, setting)
    if arch.qk_norm != "none":
        rows = (arch.heads, arch.kv_heads) if arch.qk_norm == "head" else (1, 1)
        _rms(tape, arch, setting, f"{name} query norm", f"{name} raw query", width=q, rows=rows[0], c=c)
        _rms(tape, arch, setting, f"{name} key norm", f"{name} raw key", width=kv, rows=rows[1], c=c)
    repeated = q if setting.eager else kv  # eager attention copies keys and values once per query head
    tape.keep(f"{name} query", c * q)
    tape.keep(f"{name} key", c * repeated)
    tape.keep(f"{name} value", c * repeated)
    if setting.eager:
        _scores(tape, arch, setting, name)
    else:
        tape.keep(f"{name} projection", c * _projection_views(arch, q, kv))
        copied = arch.rotary_joins and not setting.compiled
        tape.keep(f"{name} output" if copied else outputs, c * q)
        tape.keep(f"{name} log-sum-exp", _STATISTIC * arch.heads)
        if arch.norm == "rms-t5" and not cross:  # each layer makes its own copy of the learned position bias
            tape.keep(f"{name} bias", c * arch.heads * setting.seq_len)
    tape.read_by_linears(outputs, q, setting)


def _projection_views(arch: Architecture, q: int, kv: int) -> int:
    """Elements of a fused projection that stay because the value, a view of it, does: the rotated queries and keys
    are new tensors. Unrotated, all three are views and nothing stays besides them.
    """
    return q + kv if arch.fused_qkv and arch.rotary_dim else 0


def _scores(tape: Tape, arch: Architecture, setting: Setting, name: str) -> None:
    """Eager attention: for every head and pair of positions a softmax, in FP32 where the family casts it up."""
    c, pairs = setting.compute_bytes, arch.heads * setting.seq_len
    widens = c != 4 and arch.family in _SOFTMAX_IN_FP32
    tape.keep(f"{name} softmax", (4 if widens else c) * pairs)
    if widens and not setting.attention_dropout:
        tape.keep(f"{name} probabilities", c * pairs)
    if arch.attention_softcap:
        tape.keep(f"{name} softcap", c * pairs)
    if setting.attention_dropout:
        tape.keep(f"{name} dropped probabilities", c * pairs)
        tape.keep(f"{name} dropout mask", pairs)


_SOFTMAX_IN_FP32 = (
    "llama", "mistral", "ministral", "qwen2", "qwen3", "granite", "smollm3", "olmo2", "phi3", "phi", "gemma", "gemma2",
    "gemma3_text", "mixtral", "qwen3_moe", "stablelm", "gpt_neox", "modernbert", "vit",
)  # fmt: skip


def mlp(tape: Tape, arch: Architecture, setting: Setting, *, ffn: int) -> None:
    """A gated or plain MLP."""
    c = setting.compute_bytes
    tape.read_by_linears("mlp_in", arch.hidden, setting)
    activated = "mlp activated"
    if arch.gated_mlp:
        tape.keep("mlp gate", c * ffn)
        tape.keep(activated, 0 if setting.compiled else c * ffn)
        tape.keep("mlp up", c * ffn)
    elif arch.activation == "relu":  # keeps its output, which the next layer reads
        activated = "mlp_mid"
        tape.keep("mlp relu" if _drops_inside(arch, setting) else activated, c * ffn)
    else:
        wide = arch.activation in _COMPOSED_GELU and not setting.compiled
        tape.keep("mlp up", (setting.stream_bytes if wide else c) * ffn)
    if (
        arch.activation in _COMPOSED_GELU and not setting.compiled
    ):  # under autocast the power, and so the tanh, are FP32
        tape.keep("mlp gelu parts", (c + 2 * setting.stream_bytes) * ffn)
    if _drops_inside(arch, setting):
        tape.keep("mlp dropout mask", ffn)
    tape.read_by_linears("mlp_mid", ffn, setting)


def _drops_inside(arch: Architecture, setting: Setting) -> bool:
    return arch.kind == "encoder-decoder" and setting.training_dropout > 0


def experts(tape: Tape, arch: Architecture, setting: Setting, *, trained: bool, router_trained: bool) -> None:
    """A mixture through grouped products: each token's rows once per expert it goes to, evenly routed or not.

    Autocast does not know grouped products: they run in the type of the residual stream.
    """
    c, k = setting.stream_bytes, arch.experts_per_token
    if router_trained:
        tape.keep("mlp_in", setting.compute_bytes * arch.hidden)
    tape.keep("router probabilities", 4 * arch.experts)
    tape.keep("router choices", k * (4 * _INDEX + 3 * _STATISTIC))
    if trained:
        tape.keep("expert inputs", c * arch.hidden * k)
        tape.keep("expert products", c * arch.expert_ffn * k)
    tape.keep("expert gate and up", 2 * c * arch.expert_ffn * k)
    tape.keep("expert activated gate", c * arch.expert_ffn * k)
    tape.keep("expert outputs", c * arch.hidden * k)
    if arch.shared_expert_ffn:
        mlp(tape, arch, setting, ffn=arch.shared_expert_ffn)


def residual_dropout(tape: Tape, arch: Architecture, setting: Setting, name: str) -> None:
    """The mask of a dropout on the residual branch: one byte per element on accelerators."""
    if setting.training_dropout:
        tape.keep(f"{name} residual dropout mask", arch.hidden)
