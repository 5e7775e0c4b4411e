"""What tensor-parallel ranks sum: outputs of split rows forward, inputs' gradients of split columns backward, squares of
split weights under DoRA; and the logits that they join (:mod:`lightning_shard.parallelize.tensor`,
:mod:`lightning_shard.parallelize.vocabulary`, :mod:`lightning_shard.parallelize.magnitude`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_shard.activations.block import num_tokens
from lightning_shard.activations.linears import find_linears, norms_train
from lightning_shard.activations.loss import CHUNK_TOKENS
from lightning_shard.memory import Situation
from lightning_shard.memory.situation import Block, input_needs_gradient
from lightning_shard.specs import TensorSpec
from lightning_shard.specs.split import (
    COLUMNS,
    ROWS,
    SUMMED,
    full_name,
    split_layers,
    split_vocabulary,
    splits_head,
    style_of,
)


@dataclass(frozen=True, slots=True)
class Sums:
    """Collectives of one kind in one micro-batch: bytes of the whole side, and how many."""

    num_bytes: int = 0
    messages: int = 0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(self.num_bytes + other.num_bytes, self.messages + other.messages)

    def __mul__(self, count: int) -> "Sums":
        return Sums(self.num_bytes * count, self.messages * count)


def tensor_sums(s: Situation) -> Sums:
    """All-reduces: of all blocks, recomputing ones forward twice, of the embedding and of the head's input."""
    total = Sums()
    if s.plan.tp == 1:
        return total
    for block in s.blocks:
        tensors = block.group.unit.tensors
        rows, columns = (split_layers(s.model, tensors, style) for style in (ROWS, COLUMNS))
        again, split = _called_again(s, rows, tensors), {_layer_of(tensor) for tensor in rows if not tensor.adapter}
        fixed = _of(s, [tensor.shape[0] for tensor in again]) + _squares(
            [t for t in _magnitudes(tensors) if _beside(t) in split]
        )
        forward = _of(s, [tensor.shape[0] for tensor in rows]) + fixed
        backward = _of(s, [tensor.shape[1] for tensor in columns + _called_again(s, columns, tensors)])
        total += (forward + backward + _shared_weights(s, block)) * block.group.count
        total += (_of(s, [tensor.shape[0] for tensor in _summed_again(rows)]) + fixed) * block.recomputing
    return total + _vocabulary(s) + _of(s, [_hidden(s)] * _without_gradient(s)) * -1


def _magnitudes(tensors: Iterable[TensorSpec]) -> list[TensorSpec]:
    """DoRA's, one per adapted layer."""
    return [tensor for tensor in tensors if ".lora_magnitude_vector." in f".{tensor.name}"]


def _beside(tensor: TensorSpec) -> str:
    """The layer that an adapter's tensor is beside."""
    return tensor.name.partition(".lora_")[0]


def _squares(magnitudes: list[TensorSpec]) -> Sums:
    """Squares of split weights, summed in FP32, one per norm."""
    return Sums(4 * sum(tensor.numel for tensor in magnitudes), len(magnitudes))


def _called_again(s: Situation, layers: list[TensorSpec], tensors: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Weights that DoRA multiplies a second time: its dropout gives them another input than the layer's own."""
    if s.model.adapter is None or not s.model.adapter.dropout:
        return []
    adapted = {_beside(tensor) for tensor in _magnitudes(tensors)}
    return [tensor for tensor in layers if not tensor.adapter and _layer_of(tensor) in adapted]


def tensor_gathers(s: Situation) -> Sums:
    """All-gathers: the logits of a split head, or, chunk by chunk, two FP32 numbers of each rank and token."""
    arch = s.model.architecture
    if arch is None or not splits_head(s.model, s.plan.tp):
        return Sums()
    tokens = num_tokens(s.model, s.train)
    if s.train.loss == "chunked":
        return Sums(2 * 4 * s.plan.tp * tokens, math.ceil(tokens / CHUNK_TOKENS))
    return Sums(s.compute_bytes * arch.vocab * tokens, 1)


def _vocabulary(s: Situation) -> Sums:
    """The embedding's output forward; backward the gradient of the head's input, and of an adapter's second matrix."""
    widths = [_hidden(s)] if s.splits_embedding else []
    if splits_head(s.model, s.plan.tp) and any(t.trainable for unit, t in s.model.tensors() if unit.kind != "head"):
        split = split_vocabulary(s.model, s.plan.tp)
        second = [t for u, t in s.model.tensors() if u.kind == "head" and t.adapter and full_name(u, t) in split]
        widths += [_hidden(s), *(tensor.shape[1] for tensor in second if len(tensor.shape) == 2)]
        again = s.model.adapter is not None and s.model.adapter.dropout > 0
        widths += [_hidden(s)] * len(_magnitudes(second)) * again
    tables = [tensor for unit, tensor in s.model.tensors() if unit.kind == "embedding"] if s.splits_embedding else []
    return _of(s, widths) + _squares(_magnitudes(tables))


def _of(s: Situation, widths: list[int]) -> Sums:
    return Sums(s.compute_bytes * num_tokens(s.model, s.train) * sum(widths), len(widths))


def _hidden(s: Situation) -> int:
    return s.model.architecture.hidden if s.model.architecture is not None else 0


def _summed_again(rows: list[TensorSpec]) -> list[TensorSpec]:
    """Recomputation stops once all that is kept is back: a last product without an adapter sums no second time."""
    adapted = any(tensor.adapter and tensor.name.startswith(_layer(rows)) for tensor in rows)
    return rows if adapted or not rows else [tensor for tensor in rows if not tensor.name.startswith(_layer(rows))]


def _layer(rows: list[TensorSpec]) -> str:
    """The last split layer, which ends the block."""
    return _layer_of([tensor for tensor in rows if not tensor.adapter][-1])


def _layer_of(tensor: TensorSpec) -> str:
    return tensor.name.removesuffix(".weight").removesuffix(".base_layer")


def _shared_weights(s: Situation, block: Block) -> Sums:
    """Gradients of weights that every rank uses for its own heads (norms of queries and keys)."""
    weights = [t for t in block.group.unit.tensors if t.trainable and style_of(s.model, t) == SUMMED]
    return Sums(s.compute_bytes * sum(tensor.numel for tensor in weights), len(weights))


def _without_gradient(s: Situation) -> int:
    """Layers of the first block whose input needs no gradient, so that none is summed."""
    if not s.blocks or input_needs_gradient(s.model) or norms_train(s.blocks[0].group.unit):
        return 0
    linears, arch = find_linears(s.blocks[0].group.unit), s.model.architecture
    shared = linears.reading("mlp_in") if arch is not None and arch.shared_norm else ()
    uses = (*linears.reading("attention_in"), *shared)
    tensors = s.blocks[0].group.unit.tensors
    split = [tensor for tensor in split_layers(s.model, tensors, COLUMNS) if not tensor.adapter]
    split += _called_again(s, split, tensors)
    names = {use.name for use in uses}
    return sum(_layer_of(tensor) in names for tensor in split)
