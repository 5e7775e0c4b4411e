"""Specs written by hand, so that tests of decisions need neither torch nor a config."""

from lightning_shard.hardware import Cluster, find_device, find_link, link_between_nodes
from lightning_shard.specs import Architecture, ModelSpec, TensorSpec, UnitSpec

GIB = 2**30
TP_PLAN = (
    *((f"self_attn.{name}_proj", "colwise") for name in ("q", "k", "v")),
    ("self_attn.o_proj", "rowwise"),
    ("mlp.gate_proj", "colwise"),
    ("mlp.up_proj", "colwise"),
    ("mlp.down_proj", "rowwise"),
)
"""How transformers' Llama splits its layers."""


def llama(
    *,
    name: str = "llama",
    hidden: int = 4096,
    layers: int = 32,
    heads: int = 32,
    kv_heads: int = 8,
    ffn: int = 14336,
    vocab: int = 128256,
    tied: bool = False,
    max_positions: int = 131072,
) -> ModelSpec:
    """A Llama; the defaults are Llama-3.1-8B."""
    head_dim = hidden // heads
    kv = kv_heads * head_dim
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    linears = tuple(TensorSpec(name=f"{key}.weight", shape=shape, owner="Linear") for key, shape in shapes.items())
    norms = tuple(
        TensorSpec(name=f"{key}.weight", shape=(hidden,), owner="LlamaRMSNorm")
        for key in ("input_layernorm", "post_attention_layernorm")
    )
    table = TensorSpec(name="weight", shape=(vocab, hidden), owner="Embedding")
    head = TensorSpec(name="weight", shape=(vocab, hidden), owner="Linear")
    units = [
        UnitSpec(
            kind="block",
            names=tuple(f"model.layers.{i}" for i in range(layers)),
            tensors=linears + norms,
            module_class="LlamaDecoderLayer",
        ),
        UnitSpec(kind="embedding", names=("model.embed_tokens",), tensors=(table,), module_class="Embedding"),
    ]
    if not tied:
        units.append(UnitSpec(kind="head", names=("lm_head",), tensors=(head,), module_class="Linear"))
    units.append(UnitSpec(kind="root", names=("",), tensors=(TensorSpec(name="model.norm.weight", shape=(hidden,)),)))
    return ModelSpec(
        name=name,
        family="llama",
        units=tuple(units),
        tied=(("model.embed_tokens.weight", "lm_head.weight"),) if tied else (),
        tp_plan=TP_PLAN,
        architecture=Architecture(
            family="llama",
            hidden=hidden,
            num_layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            ffn=ffn,
            vocab=vocab,
            max_positions=max_positions,
            gated_mlp=True,
            activation="silu",
            norm="rms",
            rotary_dim=head_dim,
        ),
    )


LLAMA_8B = llama(name="llama-3.1-8b")
LLAMA_70B = llama(name="llama-3-70b", hidden=8192, layers=80, heads=64, ffn=28672, vocab=128256, max_positions=8192)
LLAMA_2_7B = llama(name="llama-2-7b", kv_heads=32, ffn=11008, vocab=32000, max_positions=4096)
LLAMA_2_70B = llama(name="llama-2-70b", hidden=8192, layers=80, heads=64, ffn=28672, vocab=32000, max_positions=4096)
LLAMA_1B = llama(name="llama-3.2-1b", hidden=2048, layers=16, heads=32, ffn=8192, tied=True)
TINY = llama(name="tiny", hidden=64, layers=4, heads=4, kv_heads=2, ffn=128, vocab=256, max_positions=512)


def cluster(device: str = "h100-sxm", devices: int = 8, nodes: int = 1, memory_gib: float | None = None) -> Cluster:
    """Equal nodes of one device of the hardware table."""
    row = find_device(device)
    assert row is not None
    return Cluster(
        num_nodes=nodes,
        devices_per_node=devices,
        device=row,
        device_memory_bytes=None if memory_gib is None else int(memory_gib * GIB),
        intra_link=find_link(row.intra_link),
        inter_link=link_between_nodes(row.intra_link),
        accelerator="cpu" if row.name == "cpu" else "gpu",
    )
