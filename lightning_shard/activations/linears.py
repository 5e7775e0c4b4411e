"""Which linear layers a block has, what they read, and what their gradients need of it."""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from lightning_shard.specs import UnitSpec
from lightning_shard.specs.inject import in_out, is_linear

Input = Literal["attention_in", "attention_out", "cross_in", "cross_out", "mlp_in", "mlp_mid", "other"]

_READS: dict[str, Input] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv"), "attention_in"),
    **dict.fromkeys(("query", "key", "value", "q", "k", "v", "W_pack", "in_proj"), "attention_in"),
    **dict.fromkeys(("o_proj", "o", "out_proj", "attn.c_proj", "attn.Wo", "attention.dense"), "attention_out"),
    **dict.fromkeys(("self_attn.dense", "attention.output.dense", "attention.o_proj"), "attention_out"),
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "fc1", "c_fc", "wi", "wi_0", "wi_1"), "mlp_in"),
    **dict.fromkeys(("dense_h_to_4h", "intermediate.dense", "Wi", "linear1", "gate"), "mlp_in"),
    **dict.fromkeys(("down_proj", "fc2", "mlp.c_proj", "dense_4h_to_h", "output.dense", "wo"), "mlp_mid"),
    **dict.fromkeys(("mlp.Wo", "linear2"), "mlp_mid"),
}  # fmt: skip
_CROSS = ("EncDecAttention", "crossattention", "encoder_attn", "multihead_attn")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearUse:
    """One linear layer as a block uses it."""

    name: str
    reads: Input
    num_in: int
    num_out: int
    trained: bool
    """Its own weight trains, so its input is kept."""
    rank: int = 0
    """Rank of the adapter beside it; 0 for none."""
    magnitude: bool = False
    """Whether that is DoRA's."""


@dataclass(frozen=True, slots=True)
class LinearUses:
    """The linear layers of one block."""

    uses: tuple[LinearUse, ...] = field(default=())

    def reading(self, source: Input) -> tuple[LinearUse, ...]:
        """Those that read one tensor."""
        return tuple(use for use in self.uses if use.reads == source)

    def renamed(self, old: Input, new: Input) -> "LinearUses":
        """The same layers where two of their inputs are one tensor."""
        uses = (dataclasses.replace(use, reads=new if use.reads == old else use.reads) for use in self.uses)
        return LinearUses(tuple(uses))


def find_linears(unit: UnitSpec) -> LinearUses:
    """The linear layers among a unit's tensors, in order."""
    ranks = {_adapted_module(t.name): t.shape[0] for t in unit.tensors if t.adapter and "lora_A" in t.name}
    scaled = {_adapted_module(t.name) for t in unit.tensors if ".lora_magnitude_vector." in t.name}
    return LinearUses(tuple(_uses(unit, ranks, scaled)))


def norms_train(unit: UnitSpec) -> bool:
    """Whether the block's own vectors (norm weights, biases) train."""
    return any(t.trainable for t in unit.tensors if len(t.shape) == 1 and not t.adapter)


def is_mlp(tensor_name: str) -> bool:
    """Whether a tensor belongs to a layer of the MLP, adapters included."""
    module = _adapted_module(tensor_name) if ".lora_" in tensor_name else tensor_name.rpartition(".")[0]
    return _reads(module.removesuffix(".base_layer")) in ("mlp_in", "mlp_mid")


def _uses(unit: UnitSpec, ranks: dict[str, int], scaled: set[str]) -> Iterable[LinearUse]:
    for tensor in unit.tensors:
        if tensor.adapter or not is_linear(tensor):
            continue
        name = tensor.name.removesuffix(".weight").removesuffix(".base_layer")
        num_in, num_out = in_out(tensor)
        yield LinearUse(
            name=name,
            reads=_reads(name),
            num_in=num_in,
            num_out=num_out,
            trained=tensor.trainable,
            rank=ranks.get(name, 0),
            magnitude=name in scaled,
        )


def _adapted_module(tensor_name: str) -> str:
    return tensor_name.partition(".lora_")[0]


def _reads(name: str) -> Input:
    parts = name.split(".")
    for length in (3, 2, 1):
        found = _READS.get(".".join(parts[-length:]))
        if found is not None:
            return _cross(name, found) if any(mark in name for mark in _CROSS) else found
    return "other"


def _cross(name: str, found: Input) -> Input:
    """Of a cross-attention only the query reads the decoder; all layers share the encoder's output."""
    if found == "attention_out":
        return "cross_out"
    return "cross_in" if name.rpartition(".")[2] in ("q", "q_proj", "query") else "other"
