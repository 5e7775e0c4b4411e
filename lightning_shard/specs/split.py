"""Tensor parallelism as facts: which layers a model's own plan splits, and what one rank then holds of them.

The acting side is :mod:`lightning_shard.parallelize.tensor`; what is refused here is what it refuses.
"""

import dataclasses
from collections.abc import Iterable

from lightning_shard.specs.architecture import Architecture
from lightning_shard.specs.model import ModelSpec, TensorSpec, UnitSpec

COLUMNS, ROWS, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"
_WHOLE_MATRICES = ("lora_A", "lora_embedding_")


def layer_styles(tp_plan: object) -> tuple[tuple[str, str], ...]:
    """(layer within a block, style) of a transformers plan such as ``{"layers.*.mlp.up_proj": "colwise"}``.

    What it says of embedding and head, outside the numbered blocks, is left out: they are split alike in every model
    (:func:`split_vocabulary`).
    """
    if not isinstance(tp_plan, dict):
        return ()
    styles = {str(name).partition("*.")[2]: str(style) for name, style in tp_plan.items() if "*." in str(name)}
    return tuple(styles.items())


def why_not_split(model: ModelSpec, tp: int) -> str | None:
    """Why ``tp`` ranks cannot share this model's matrix products; None when they can."""
    arch = model.architecture
    if not model.tp_plan or arch is None:
        return (
            f"{model.name} says no way to split its layers (transformers' tp_plan; a spec saved by an earlier version holds "
            "none): use tp=1, dp_shard splits any module"
        )
    odd = sorted({style for _, style in model.tp_plan} - {COLUMNS, ROWS, SUMMED})
    if odd:
        return (
            f"{model.name} asks for {', '.join(odd)} (fused projections or experts), which tp does not split: use tp=1"
        )
    counts = {
        "attention heads": arch.heads,
        "key-value heads": arch.kv_heads,
        "hidden size": arch.hidden,
        "intermediate size": arch.ffn,
    }
    for what, count in counts.items():
        if count % tp:
            return f"tp={tp} does not divide the {count} {what} of {model.name}: use a divisor of it"
    return None


def rank_unit(model: ModelSpec, unit: UnitSpec, tp: int) -> UnitSpec:
    """What one of ``tp`` ranks holds of a unit: the split tensors' own rows or columns, the rest whole."""
    if tp == 1:
        return unit
    if unit.kind == "block":
        return dataclasses.replace(unit, tensors=tuple(_part(model, tensor, tp) for tensor in unit.tensors))
    split = split_vocabulary(model, tp)
    parts = (_rows(tensor, tp) if full_name(unit, tensor) in split else tensor for tensor in unit.tensors)
    return dataclasses.replace(unit, tensors=tuple(parts))


def split_vocabulary(model: ModelSpec, tp: int) -> frozenset[str]:
    """Full names of the tensors of embedding and head of which each of ``tp`` ranks holds its rows of the vocabulary.

    Whole stay an embedding whose rows ``tp`` does not divide, with its head, a head that has other rows, and an adapter's
    first matrix (of a table, both).
    """
    num_rows = 0 if tp == 1 else vocabulary_rows(model)
    if not num_rows or num_rows % tp:
        return frozenset()
    embedding, head = (
        next((unit for unit in model.units if unit.kind == kind), None) for kind in ("embedding", "head")
    )
    return frozenset(
        full_name(unit, tensor)
        for unit in (embedding, head)
        if unit is not None
        for tensor in unit.tensors
        if tensor.shape[:1] == (num_rows,) and not any(mark in tensor.name for mark in _WHOLE_MATRICES)
    )


def vocabulary_rows(model: ModelSpec) -> int:
    """Rows of the input embedding's table; 0 for a model that has none."""
    tables = (unit.tensors for unit in model.units if unit.kind == "embedding")
    return next((tensor.shape[0] for tensor in next(tables, ()) if len(tensor.shape) == 2 and not tensor.adapter), 0)


def splits_head(model: ModelSpec, tp: int) -> bool:
    """Whether each of ``tp`` ranks computes its part of the logits: the head has rows of its own, or the embedding's."""
    split = split_vocabulary(model, tp)
    if not split:
        return False
    tied = any(name in split for pair in model.tied for name in pair)
    return tied or any(full_name(u, t) in split for u, t in model.tensors() if u.kind == "head" and len(t.shape) == 2)


def full_name(unit: UnitSpec, tensor: TensorSpec) -> str:
    """A tensor's name in the model, for the first of the unit's repetitions."""
    return f"{unit.names[0]}.{tensor.name}"


def rank_architecture(arch: Architecture, tp: int) -> Architecture:
    """The block that one of ``tp`` ranks computes: its heads and its part of the MLP's width."""
    return dataclasses.replace(arch, heads=arch.heads // tp, kv_heads=arch.kv_heads // tp, ffn=arch.ffn // tp)


def style_of(model: ModelSpec, tensor: TensorSpec) -> str | None:
    """How a tensor of a block is split: by the plan for its layer, an adapter so that its product fits the layer's;
    None for what is whole.
    """
    layer = tensor.name.rpartition(".")[0]
    base, adapter, _ = layer.partition(".lora_")
    style = dict(model.tp_plan).get(base.removesuffix(".base_layer"))
    if not adapter or style not in (COLUMNS, ROWS):
        return style
    first = ".lora_A" in tensor.name
    return None if first == (style == COLUMNS) else style


def _rows(tensor: TensorSpec, tp: int) -> TensorSpec:
    return dataclasses.replace(tensor, shape=(tensor.shape[0] // tp, *tensor.shape[1:]))


def _part(model: ModelSpec, tensor: TensorSpec, tp: int) -> TensorSpec:
    style, shape = style_of(model, tensor), tensor.shape
    if style == COLUMNS:
        return _rows(tensor, tp)
    if style == ROWS and len(shape) == 2:
        return dataclasses.replace(tensor, shape=(shape[0], shape[1] // tp))
    return tensor


def split_layers(model: ModelSpec, tensors: Iterable[TensorSpec], style: str) -> list[TensorSpec]:
    """The matrices of one style among a block's tensors."""
    return [tensor for tensor in tensors if len(tensor.shape) == 2 and style_of(model, tensor) == style]
