"""The activation formulas against what autograd keeps, family by family, on tiny models."""

import dataclasses
from typing import Any

import pytest
import torch
import transformers
from saved_for_backward import saved_storages

from lightning_shard.activations import block_activations
from lightning_shard.blocks import find_blocks
from lightning_shard.parallelize.recompute import checkpoint_activations
from lightning_shard.parallelize.units import Units
from lightning_shard.plans import Plan
from lightning_shard.specs import ModelSpec, TrainSpec
from lightning_shard.specs.sizes import allocated_bytes

BATCH, SEQ, VOCAB = 2, 16, 97
_PLAIN: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "intermediate_size": 80,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_PLAIN, "num_key_value_heads": 2}
_GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 6, "vocab_size": VOCAB, "n_positions": 64}
_EXPERTS = {**_GROUPED, "num_experts_per_tok": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "olmo2", "granite", "smollm3", "phi3", "stablelm", "phi"), _GROUPED),
    **dict.fromkeys(("qwen3", "gemma", "gemma2", "gemma3_text"), {**_GROUPED, "head_dim": 16}),
    "gpt_neox": _PLAIN,
    "gpt2": _GPT2,
    "gpt_bigcode": {**_GPT2, "multi_query": True},
    "mixtral": {**_EXPERTS, "num_local_experts": 4},
    "qwen3_moe": {**_EXPERTS, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 32},
    "bert": _PLAIN,
    "modernbert": {**_PLAIN, "reference_compile": False, "cls_token_id": 1, "sep_token_id": 2},
    "vit": {**{k: _PLAIN[k] for k in list(_PLAIN)[:4]}, "image_size": 32, "patch_size": 8},
    "t5": {"d_model": 48, "d_kv": 8, "d_ff": 80, "num_layers": 3, "num_heads": 6, "vocab_size": VOCAB,
           "decoder_start_token_id": 0},
}  # fmt: skip
_CLASSES = {
    "bert": transformers.BertForMaskedLM,
    "modernbert": transformers.ModernBertForMaskedLM,
    "vit": transformers.ViTForImageClassification,
    "t5": transformers.T5ForConditionalGeneration,
}
EXACT = ("llama", "mistral", "qwen2", "qwen3", "granite", "smollm3", "olmo2", "phi3")
EAGER_ONLY = ("gemma2", "t5")  # gemma2 has no sdpa; t5's learned bias takes another kernel on CPU
LORA = tuple(name for name in CONFIGS if name not in ("mixtral", "qwen3_moe", "t5", "modernbert"))


def build(family: str, dtype: torch.dtype, attention: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **CONFIGS[family])
    config._attn_implementation = attention
    known = _CLASSES.get(family)
    model = known(config) if known else transformers.AutoModelForCausalLM.from_config(config)
    return model.to(dtype).train()


def inputs(family: str, dtype: torch.dtype) -> dict[str, Any]:
    if family == "vit":
        return {"pixel_values": torch.randn(BATCH, 3, 32, 32, dtype=dtype)}
    ids = torch.randint(3, VOCAB, (BATCH, SEQ))
    if family == "t5":
        return {"input_ids": ids, "decoder_input_ids": ids, "use_cache": False}
    return {"input_ids": ids} if family in _CLASSES else {"input_ids": ids, "use_cache": False}


def compare(
    family: str,
    model: torch.nn.Module,
    spec: ModelSpec,
    dtype: torch.dtype,
    attention: str,
    *,
    compiled: bool = False,
) -> float:
    """Estimated over real bytes of the last block of the longest run."""
    unit = max(spec.blocks, key=lambda unit: (unit.count, unit.names[0].startswith("encoder")))
    train = TrainSpec(
        micro_batch_size=BATCH,
        seq_len=SEQ,
        precision="32-true" if dtype is torch.float32 else "bf16-true",
        attention=attention,
    )
    block = dict(find_blocks(model))[unit.names[-1]]
    if compiled:  # the partition that the compiler makes, its code not generated
        torch.compiler.reset()
        block.forward = torch.compile(block.forward, backend="aot_eager_decomp_partition")
    real = sum(saved_storages(model, block, **inputs(family, dtype)))
    estimate = block_activations(spec, unit, train, compiled=compiled)
    assert estimate.exact
    assert sum(map(allocated_bytes, estimate.sizes)) == estimate.kept_bytes
    return sum(estimate.sizes) / real


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", CONFIGS)
def test_full_training(family: str, dtype: torch.dtype, attention: str) -> None:
    if (family in EAGER_ONLY and attention == "sdpa") or (family == "gpt_bigcode" and attention == "eager"):
        pytest.skip("this kernel is not the one an accelerator would take")
    model = build(family, dtype, attention)
    ratio = compare(family, model, ModelSpec.from_module(model), dtype, attention)
    assert ratio == 1.0 if family in EXACT else ratio == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("adapter_dtype", ["compute", "float32"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    ("family", "method"), [*((family, "lora") for family in LORA), *((family, "dora") for family in ("llama", "qwen2"))]
)
def test_adapters(family: str, method: str, dropout: float, adapter_dtype: str) -> None:
    peft = pytest.importorskip("peft")
    attention = "eager" if family in EAGER_ONLY else "sdpa"
    model = build(family, torch.bfloat16, attention)
    model = peft.get_peft_model(
        model,
        peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout, use_dora=method == "dora"),
    )
    spec = ModelSpec.from_module(model)
    assert spec.adapter is not None
    assert spec.adapter.r == 4
    assert spec.adapter.dropout == dropout
    if adapter_dtype == "compute":
        model.to(torch.bfloat16)
    else:
        spec = dataclasses.replace(spec, adapter=dataclasses.replace(spec.adapter, compute_dtype="float32"))
    ratio = compare(family, model, spec, torch.bfloat16, attention)
    assert ratio == 1.0 if family in EXACT else ratio == pytest.approx(1.0, abs=0.012)


COMPILED = [
    ("llama", None, "compute"), ("llama", 0.1, "compute"), ("qwen3", 0.0, "float32"), ("olmo2", None, "compute"),
    ("phi3", None, "compute"), ("gpt_neox", 0.1, "compute"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "dropout", "adapter_dtype"), COMPILED)
def test_compiled(family: str, dropout: float | None, adapter_dtype: str) -> None:
    """What a compiled block keeps: element-wise results are made again, what products read is not."""
    peft = pytest.importorskip("peft")
    model = build(family, torch.bfloat16, "sdpa")
    if dropout is not None:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout))
    if adapter_dtype == "compute":
        model.to(torch.bfloat16)
    spec = ModelSpec.from_module(model)
    if adapter_dtype == "float32":
        spec = dataclasses.replace(spec, adapter=dataclasses.replace(spec.adapter, compute_dtype="float32"))
    ratio = compare(family, model, spec, torch.bfloat16, "sdpa", compiled=True)
    assert ratio == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(("family", "lora"), [("llama", False), ("llama", True), ("gpt_neox", True)])
def test_compiled_and_recomputing_selectively(family: str, lora: bool) -> None:
    """The policy's products, less those that only the block's own result is made of."""
    peft = pytest.importorskip("peft")
    model = build(family, torch.bfloat16, "sdpa")
    if lora:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear")).to(torch.bfloat16)
    spec = ModelSpec.from_module(model)
    unit = max(spec.blocks, key=lambda unit: unit.count)
    block = dict(find_blocks(model))[unit.names[-1]]
    units = Units(model, blocks=[(unit.names[-1], block)])
    checkpoint_activations(units, Plan(activation_checkpoint="selective"), {})
    torch.compiler.reset()
    block.forward = torch.compile(block.forward, backend="aot_eager_decomp_partition")
    real = sum(saved_storages(model, block, **inputs(family, torch.bfloat16)))
    train = TrainSpec(micro_batch_size=BATCH, seq_len=SEQ)
    estimate = block_activations(spec, unit, train, compiled=True)
    assert estimate.input_bytes + estimate.selective_bytes == real


@pytest.mark.parametrize("family", CONFIGS)
def test_adapters_are_counted_as_peft_makes_them(family: str) -> None:
    """ "all-linear" included: routers and stacked experts of mixtures, GPT-2's transposed layers, tied heads."""
    from lightning_shard.specs import AdapterSpec

    peft = pytest.importorskip("peft")
    model = build(family, torch.float32, "eager")
    before = ModelSpec.from_module(model)
    assert before.num_parameters == sum(p.numel() for p in model.parameters())
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert before.with_adapter(AdapterSpec(r=4)).num_trainable == trained
    assert ModelSpec.from_module(model).num_trainable == trained
