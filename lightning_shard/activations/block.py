"""One block's activations: what it keeps, what a recomputing block keeps, and what backward makes on the way."""

import dataclasses
from dataclasses import dataclass

from lightning_shard.activations import parts
from lightning_shard.activations.linears import find_linears, is_mlp, norms_train
from lightning_shard.activations.tape import Setting, Tape
from lightning_shard.specs import Architecture, ModelSpec, TrainSpec, UnitSpec, dtype_bytes

NORM_GRADIENTS = 5
"""FP32 tensors of the hidden size that are alive in the backward of an RMSNorm written out in operations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackwardPoint:
    """One point of a block's backward."""

    gradient_bytes: int
    """Gradients of activations, less what is kept and has been freed by then."""
    making_numel: int = 0
    """Elements of the weight gradient that is made there and goes at once where nothing waits."""
    made_numel: int = 0
    """Elements of all weight gradients made so far, where they wait for the group's end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockActivations:
    """Bytes of one block for one micro-batch."""

    kept_bytes: int
    """Kept from forward to backward."""
    input_bytes: int
    """Kept where the block recomputes: its input."""
    selective_bytes: int
    """Kept besides where the block recomputes selectively: attention's output and every second product's."""
    points: tuple[BackwardPoint, ...]
    """The points of its backward that may be the fullest."""
    input_norm_bytes: int
    """Of what is kept, the first norm's share: not kept where the block's input needs no gradient."""
    sizes: tuple[int, ...]
    """Bytes of each tensor that is kept."""
    overwritten_bytes: int
    """Of those, the compiled gated product's: a forward that keeps nothing writes it over the gate (inductor's
    ``inplace_buffers``).
    """
    remade_bytes: int
    """Where the block recomputes, beside what it keeps at the end of that."""
    own_input_bytes: int = 0
    """Of what is kept, its input itself: one tensor with the input that a recomputing block keeps."""
    untaken_bytes: int = 0
    """Of what it keeps where it recomputes selectively, the last product's result: recomputing ends before it."""
    exact: bool
    """Derived from the architecture; False means estimated from shapes."""


def block_activations(
    model: ModelSpec, unit: UnitSpec, train: TrainSpec, *, autocast: bool = False, compiled: bool = False
) -> BlockActivations:
    """The activations of one repetition of a block; ``autocast`` where FP32 weights compute under it.

    A ``compiled`` block makes its element-wise results again in backward: it keeps what products and attention read and
    return, the residual stream, and a statistic per row of each norm (torch's min-cut partitioner, which never repeats
    a product and keeps what a product of the backward reads). Eager scores and routed experts count as without it.
    """
    c = compute_bytes(train, unit)
    arch = model.architecture
    tokens = num_tokens(model, train)
    if arch is None or not any(use.reads != "other" for use in find_linears(unit).uses):
        return _coarse(unit, c, tokens)
    setting = dataclasses.replace(_setting(model, unit, train, c), autocast=autocast, compiled=compiled)
    tape = saved_by_block(arch, unit, setting)
    return BlockActivations(
        kept_bytes=tape.total(tokens),
        input_bytes=setting.stream_bytes * arch.hidden * tokens,
        selective_bytes=_selective(arch, setting) * tokens,
        points=_points(arch, unit, setting, tape, tokens),
        input_norm_bytes=int(_first_norm(tape) * tokens),
        sizes=(*(int(size * tokens) for size in tape.kept.values()), *tape.once.values()),
        overwritten_bytes=int(tape.kept.get("mlp_mid", 0) * tokens) if compiled and arch.gated_mlp else 0,
        remade_bytes=_remade(arch, setting, tape) * tokens,
        own_input_bytes=int(_own_input(arch, tape) * tokens),
        untaken_bytes=_untaken(arch, setting) * tokens,
        exact=True,
    )


def compute_bytes(train: TrainSpec, unit: UnitSpec) -> int:
    """Bytes of an element in the type the block computes in."""
    compute = train.precision_row.compute_dtype
    if compute is not None:
        return dtype_bytes(compute)
    return max((tensor.element_bytes for tensor in unit.tensors), default=4)


def num_tokens(model: ModelSpec, train: TrainSpec) -> int:
    """Positions per device and forward: fixed by the input for images."""
    arch = model.architecture
    if arch is not None and arch.tokens_per_sample is not None:
        return train.micro_batch_size * arch.tokens_per_sample
    return train.tokens


def saved_by_block(arch: Architecture, unit: UnitSpec, setting: Setting) -> Tape:
    """What autograd keeps of one block, per token."""
    tape = Tape()
    before, after = arch.norm_placement in ("pre", "both"), arch.norm_placement in ("branch", "both")
    if before and not _starts_without_norm(arch, unit):
        parts.norm(tape, arch, setting, "first norm", "first residual")
    parts.attention(tape, arch, setting)
    if after:
        parts.norm(tape, arch, setting, "attention norm", "attention branch")
    parts.residual_dropout(tape, arch, setting, "attention")
    if _has_cross_attention(unit):
        parts.norm(tape, arch, setting, "cross norm", "cross residual")
        parts.attention(tape, arch, setting, cross=True)
        parts.residual_dropout(tape, arch, setting, "cross")
    if arch.norm_placement == "post":
        parts.norm(tape, arch, setting, "first norm", "first sum")
    if before and not arch.shared_norm:
        parts.norm(tape, arch, setting, "second norm", "first residual" if arch.parallel_block else "second residual")
    outside = dict(tape.kept)
    _middle(tape, arch, unit, setting)
    tape.middle = {name: size for name, size in tape.kept.items() if name not in outside}
    if after:
        parts.norm(tape, arch, setting, "mlp norm", "mlp branch")
    parts.residual_dropout(tape, arch, setting, "mlp")
    if arch.norm_placement == "post":
        parts.norm(tape, arch, setting, "second norm", "second sum")
    return tape


def _middle(tape: Tape, arch: Architecture, unit: UnitSpec, setting: Setting) -> None:
    """The MLP, or the mixture in its place."""
    weights = [tensor for tensor in unit.tensors if "experts" in tensor.name and len(tensor.shape) == 3]
    if not (arch.experts and weights):
        if arch.shared_norm:  # both branches read one tensor
            setting = dataclasses.replace(setting, linears=setting.linears.renamed("mlp_in", "attention_in"))
            tape.read_by_linears("attention_in", arch.hidden, setting)
        parts.mlp(tape, arch, setting, ffn=_ffn(arch, setting))
        return
    adapted = any(tensor.adapter for tensor in unit.tensors if "experts" in tensor.name)
    trained = adapted or any(tensor.trainable for tensor in weights)
    router = any(tensor.trainable for tensor in unit.tensors if ".gate." in tensor.name)
    parts.experts(tape, arch, setting, trained=trained, router_trained=router)
    if adapted:  # peft adds the adapter's product to the weights and computes with the sums
        elements = sum(tensor.numel for tensor in weights)
        tape.once["adapted expert weights"] = setting.stream_bytes * elements


def _setting(model: ModelSpec, unit: UnitSpec, train: TrainSpec, c: int) -> Setting:
    adapter, arch = model.adapter, model.architecture
    assert arch is not None
    own = None if adapter is None or adapter.compute_dtype is None else dtype_bytes(adapter.compute_dtype)
    return Setting(
        compute_bytes=c,
        norms_train=norms_train(unit),
        linears=find_linears(unit),
        adapter_dropout=0.0 if adapter is None else adapter.dropout,
        adapter_bytes=own,
        training_dropout=arch.dropout,
        attention_dropout=arch.attention_dropout,
        seq_len=arch.tokens_per_sample or train.seq_len,
        # Fused attention has no cap on its scores (Gemma 2): such a model runs eagerly whatever is asked.
        eager=train.attention == "eager" or bool(arch.attention_softcap),
    )


def _selective(arch: Architecture, setting: Setting) -> int:
    """Bytes per token of what the selective policy keeps: the fused attention's output with its statistic, and of
    the matrix products, in their order, the first, third and so on. Compiled, not those that only the block's own
    result is made of: no gradient needs them.
    """
    products = _product_widths(arch, setting)
    if setting.eager:  # scores and their sum are products of their own
        return setting.compute_bytes * sum(products[::2])
    return setting.compute_bytes * (sum(products[::2]) + arch.heads * arch.head_dim) + 4 * arch.heads


def _product_widths(arch: Architecture, setting: Setting) -> list[int]:
    """Width of each product's result, in the order they are computed; an adapted layer has three."""
    products: list[int] = []
    for use in setting.linears.uses:
        last = use.reads == "mlp_mid" or (use.reads == "attention_out" and arch.parallel_block)
        num_out = 0 if setting.compiled and last and arch.norm_placement == "pre" else use.num_out
        products += [num_out, *([use.rank, num_out] if use.rank else [])]
    return products


def _untaken(arch: Architecture, setting: Setting) -> int:
    """Bytes per token of the last product's result where the selective policy keeps it and nothing after it is needed
    for a gradient: torch stops recomputing once all that backward reads is there.
    """
    products = _product_widths(arch, setting)
    ends = arch.norm_placement == "pre" and not setting.training_dropout and not arch.experts and not setting.eager
    return setting.compute_bytes * products[-1] if ends and len(products) % 2 else 0


def _own_input(arch: Architecture, tape: Tape) -> float:
    """Bytes per token of the block's input where its first operation keeps that very tensor, not a cast of it."""
    name = "first residual" if arch.norm_placement in ("pre", "both") else "attention_in"
    return tape.kept.get(name, 0)


def _first_norm(tape: Tape) -> float:
    """Bytes per token that only the first norm's gradient needs. Its weight, where it trains, needs the rest."""
    names = ("first residual", "first residual in fp32", "first norm root", "first norm statistics")
    return sum(size for name, size in tape.kept.items() if name in names)


def _points(arch: Architecture, unit: UnitSpec, setting: Setting, tape: Tape, tokens: int) -> tuple[BackwardPoint, ...]:
    """After and in the last product's backward, and in that of the norms beside the MLP."""
    c, middle, fixed = setting.compute_bytes, _middle_width(arch), _summed_weight(unit, setting.stream_bytes)
    c = setting.stream_bytes if arch.experts else c
    widths = 2 if arch.gated_mlp else 1
    if not arch.experts and any(use.rank for use in setting.linears.reading("mlp_mid")):
        widths = 2  # an adapter's gradient of that input, the layer's, and their sum
    after = c * (arch.hidden + widths * middle)
    if not arch.experts:  # the product's gradient beside those of its factors; its own kept operand is gone
        after += c * middle - int(_last_operand(arch, setting, tape))
    products = _products(unit, int(after * tokens) + fixed, c * (arch.hidden + middle) * tokens + fixed)
    products += _wide_adapter(arch, setting, tokens)
    if not arch.norm.startswith("rms") or setting.compiled:  # compiled, a norm's backward is one kernel
        return products
    # FP32 gradients of the normed input, its square and its mean beside the residual's gradient.
    norm = setting.stream_bytes * arch.hidden + NORM_GRADIENTS * 4 * arch.hidden
    points = [*products]
    if arch.norm_placement in ("both", "branch"):
        points.append(BackwardPoint(gradient_bytes=norm * tokens))
    if arch.norm_placement in ("both", "pre") and not arch.parallel_block:
        freed = sum(tape.middle.values()) + tape.kept.get("second norm normed", 0)
        numel = _middle_numel(unit)
        size = int((norm - freed) * tokens) - sum(tape.once.values())
        points.append(BackwardPoint(gradient_bytes=size, made_numel=numel))
    return tuple(points)


def _remade(arch: Architecture, setting: Setting, tape: Tape) -> int:
    """Bytes per token at the end of recomputing an eager block, which is in the last product's adapter: the gradient
    that has come in, the residual, the product beside the adapter, and what its layers read unless it is kept.
    """
    last, c = setting.linears.reading("mlp_mid"), setting.compute_bytes
    if setting.compiled or arch.experts or not any(use.rank for use in last):
        return 0
    width = max(use.num_in for use in last)
    held = (2 * setting.stream_bytes + c) * arch.hidden
    held += 0 if "mlp_in" in tape.kept else setting.stream_bytes * arch.hidden
    held += 0 if "mlp_mid" in tape.kept else c * width
    own, masks = setting.adapter_bytes or c, bool(setting.adapter_dropout)
    if setting.autocast:  # peft casts to the adapter's FP32 and drops there, before autocast casts back
        return held + 4 * width * (1 + masks)
    return held + (own * width if own != c and masks else 0)


def _wide_adapter(arch: Architecture, setting: Setting, tokens: int) -> tuple[BackwardPoint, ...]:
    """In the backward of the last product's adapter where that computes in a type of its own: it comes before the
    product itself and makes the gradient of its copy of the input, the copy still there.
    """
    last, own = setting.linears.reading("mlp_mid"), setting.adapter_bytes
    if own is None or own == setting.compute_bytes or not any(use.rank for use in last):
        return ()
    width = max(use.num_in for use in last)
    return (BackwardPoint(gradient_bytes=(2 * setting.compute_bytes * arch.hidden + own * width) * tokens),)


def _products(unit: UnitSpec, after_bytes: int, in_bytes: int) -> tuple[BackwardPoint, ...]:
    """Just after the last product's backward, the heaviest point but for weights, and in it, where its weight's
    gradient is made.
    """
    largest = max((tensor.numel for tensor in unit.tensors if tensor.trainable), default=0)
    return (
        BackwardPoint(gradient_bytes=after_bytes, made_numel=largest),
        BackwardPoint(gradient_bytes=in_bytes, making_numel=largest, made_numel=largest),
    )


def _last_operand(arch: Architecture, setting: Setting, tape: Tape) -> float:
    """Bytes per token that the last product keeps of its input; a ReLU still needs it."""
    if arch.activation == "relu":
        return 0.0
    layers = tuple(f"{use.name} " for use in setting.linears.reading("mlp_mid"))
    own = [size for name, size in tape.middle.items() if layers and name.startswith(layers)]
    return sum(own) + tape.middle.get("mlp_mid", 0.0)


def _middle_numel(unit: UnitSpec) -> int:
    """Trained elements of the MLP, or of the mixture in its place."""
    return sum(t.numel for t in unit.tensors if t.trainable and (is_mlp(t.name) or "experts" in t.name))


def _summed_weight(unit: UnitSpec, c: int) -> int:
    """The gradient of adapted expert weights (sums of weight and adapter), made from the last one back: each frees
    the sum before it.
    """
    if not any(tensor.adapter and "experts" in tensor.name for tensor in unit.tensors):
        return 0
    sizes = [tensor.numel for tensor in unit.tensors if len(tensor.shape) == 3]
    return c * max(sizes[-1], *(first - second for first, second in zip(sizes, sizes[1:], strict=False)))


def _middle_width(arch: Architecture) -> int:
    return arch.expert_ffn * arch.experts_per_token if arch.experts else arch.ffn


def _coarse(unit: UnitSpec, c: int, tokens: int) -> BlockActivations:
    """From shapes alone: every matrix keeps its input and its output, every vector a normalisation in FP32."""
    matrices = [tensor.shape for tensor in unit.tensors if len(tensor.shape) >= 2 and not tensor.adapter]
    vectors = [t.shape[0] for t in unit.tensors if len(t.shape) == 1 and t.name.endswith("weight") and not t.adapter]
    elements = sum(shape[0] + shape[1] for shape in matrices)
    widest = max((max(shape[0], shape[1]) for shape in matrices), default=1)
    return BlockActivations(
        kept_bytes=(c * elements + 4 * sum(vectors)) * tokens,
        input_bytes=c * min((shape[-1] for shape in matrices), default=1) * tokens,
        selective_bytes=c * sum(shape[0] for shape in matrices[::2]) * tokens,
        points=_products(unit, 2 * c * widest * tokens, c * widest * tokens),
        input_norm_bytes=0,
        sizes=tuple(c * (shape[0] + shape[1]) * tokens for shape in matrices),
        overwritten_bytes=0,
        remade_bytes=0,
        exact=False,
    )


def _ffn(arch: Architecture, setting: Setting) -> int:
    """Width of the MLP's middle, from the block itself where its layers tell (a dense block of a mixture)."""
    middle = setting.linears.reading("mlp_mid")
    return middle[0].num_in if middle else arch.ffn


def _starts_without_norm(arch: Architecture, unit: UnitSpec) -> bool:
    """ModernBERT's first layer: the embeddings end with a norm."""
    return arch.family == "modernbert" and not any(tensor.name.startswith("attn_norm") for tensor in unit.tensors)


def _has_cross_attention(unit: UnitSpec) -> bool:
    return any("EncDecAttention" in tensor.name or "crossattention" in tensor.name for tensor in unit.tensors)
