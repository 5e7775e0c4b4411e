"""Tensor parallelism as facts: which layers a model's own plan splits, and what one rank then holds of them.

The acting side is :mod:`lightning_shard.parallelize.tensor`; what is refused here is what it refuses.
"""

import dataclasses
from collections.abc import Iterable

from lightning_shard.specs.architecture import Architecture
from lightning_shard.specs.model import ModelSpec, TensorSpec, UnitSpec

COLUMNS, ROWS, SUMMED = "colwise", "rowwise", "replicated_with_grad_allreduce"


def layer_styles(tp_plan: object) -> tuple[tuple[str, str], ...]:
    """(layer within a block, style) of a transformers plan such as ``{"layers.*.mlp.up_proj": "colwise"}``.

    Embedding and head, outside the numbered blocks, are kept whole.
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
    if model.adapter is not None and model.adapter.method == "dora":
        return "DoRA's norm runs over a whole weight, which tp would split: use method='lora', or tp=1"
    return None


def rank_unit(model: ModelSpec, unit: UnitSpec, tp: int) -> UnitSpec:
    """What one of ``tp`` ranks holds of a unit: the split tensors' own rows or columns, the rest whole."""
    if tp == 1 or unit.kind != "block":
        return unit
    return dataclasses.replace(unit, tensors=tuple(_part(model, tensor, tp) for tensor in unit.tensors))


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


def _part(model: ModelSpec, tensor: TensorSpec, tp: int) -> TensorSpec:
    style, shape = style_of(model, tensor), tensor.shape
    if style == COLUMNS:
        return dataclasses.replace(tensor, shape=(shape[0] // tp, *shape[1:]))
    if style == ROWS and len(shape) == 2:
        return dataclasses.replace(tensor, shape=(shape[0], shape[1] // tp))
    return tensor


def split_layers(model: ModelSpec, tensors: Iterable[TensorSpec], style: str) -> list[TensorSpec]:
    """The matrices of one style among a block's tensors."""
    return [tensor for tensor in tensors if len(tensor.shape) == 2 and style_of(model, tensor) == style]
