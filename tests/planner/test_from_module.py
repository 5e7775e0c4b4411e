"""Specs of live and meta modules of every make: blocks, embedding, head, adapters, and what has no blocks."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn

from lightning_shard.blocks import find_blocks, find_embedding, find_head
from lightning_shard.hardware import Cluster
from lightning_shard.planner import choose, estimate
from lightning_shard.plans import Plan
from lightning_shard.specs import ModelSpec, TrainSpec


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])


class Model(nn.Module):
    """A plain model: embedding, repeated blocks, head."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList([Block() for _ in range(blocks)])
        self.head = nn.Linear(16, 64)


class Named(Model):
    _no_split_modules = ["Block"]


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config)


class Wrapped(pl.LightningModule):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.model = inner


def names(module: nn.Module) -> list[str]:
    return [name for name, _ in find_blocks(module)]


def test_blocks_of_a_plain_model_are_its_largest_repeated_list() -> None:
    assert names(Model()) == ["layers.0", "layers.1", "layers.2"]
    assert names(Named()) == ["layers.0", "layers.1", "layers.2"]


def test_blocks_under_wrappers() -> None:
    peft = pytest.importorskip("peft")
    assert names(llama()) == [f"model.layers.{i}" for i in range(3)]
    assert names(Wrapped(llama())) == [f"model.model.layers.{i}" for i in range(3)]
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert names(Wrapped(adapted)) == [f"model.base_model.model.model.layers.{i}" for i in range(3)]


def test_a_sequence_of_equal_blocks_is_a_list_of_them() -> None:
    assert names(nn.Sequential(Block(), Block())) == ["0", "1"]
    assert names(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))) == []
    assert names(nn.Sequential(nn.Linear(4, 4))) == []


def test_an_encoder_beside_a_decoder_counts_and_a_small_list_does_not() -> None:
    both = nn.Transformer(d_model=16, nhead=2, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=32)
    assert names(both) == ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"]
    model = Model()
    model.tiny = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    assert names(model) == ["layers.0", "layers.1", "layers.2"]


def test_a_list_without_parameters_is_none() -> None:
    assert names(nn.ModuleList([nn.ReLU(), nn.ReLU()])) == []


def test_embedding_and_head_are_asked_for() -> None:
    model = Wrapped(llama())
    embedding, head = find_embedding(model), find_head(model)
    assert embedding is not None
    assert head is not None
    assert (embedding[0], head[0]) == ("model.model.embed_tokens", "model.lm_head")
    assert find_embedding(Model()) is None


def test_large_tables_and_layers_of_a_plain_model_are_groups_of_their_own() -> None:
    kinds = {unit.names[0]: unit.kind for unit in ModelSpec.from_module(Model()).units}
    assert kinds == {"layers.0": "block", "embed": "embedding", "head": "head"}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_units_cover_every_parameter_once(device: str) -> None:
    for make in (llama, Model, BoringModel):
        with torch.device(device):
            module = make()
        spec = ModelSpec.from_module(module)
        assert spec.num_parameters == sum(p.numel() for p in module.parameters())
        covered = {f"{name}.{t.name}".strip(".") for unit, t in spec.tensors() for name in unit.names}
        assert covered == {name for name, _ in module.named_parameters()}


def test_frozen_and_narrow_parameters_are_told_apart() -> None:
    module = llama().to(torch.bfloat16)
    module.requires_grad_(False)
    module.lm_head.requires_grad_(True)
    spec = ModelSpec.from_module(module)
    assert spec.num_trainable == 128 * 32
    assert {tensor.dtype for _, tensor in spec.tensors()} == {"bfloat16"}
    assert spec.parameter_bytes == 2 * spec.num_parameters


def test_the_adapter_of_a_peft_model_is_read() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj"], use_dora=True)
    spec = ModelSpec.from_module(Wrapped(peft.get_peft_model(llama(), config)))
    assert spec.adapter is not None
    assert (spec.adapter.r, spec.adapter.alpha, spec.adapter.dropout, spec.adapter.method) == (4, 8.0, 0.1, "dora")
    assert spec.num_trainable == 3 * (4 * 32 + 32 * 4 + 32)


def test_no_blocks_is_said_with_the_biggest_part() -> None:
    spec = ModelSpec.from_module(BoringModel())
    assert spec.num_blocks == 0
    assert "biggest part is 'layer' with 66 parameters" in spec.warnings[0]


def test_no_parameters_is_an_error() -> None:
    with pytest.raises(ValueError, match="ReLU has no parameters"):
        ModelSpec.from_module(nn.ReLU())


@pytest.mark.parametrize("make", [BoringModel, Model, llama])
def test_any_module_gets_a_decision(make: type[nn.Module]) -> None:
    cluster = Cluster.detect(devices=2)
    decision = choose(ModelSpec.from_module(make()), TrainSpec(seq_len=8), cluster)
    assert decision.fits
    assert decision.plan.strategy == "ddp"


def test_without_facts_activations_are_said_to_be_coarse() -> None:
    cluster = Cluster.detect(devices=2)
    coarse = estimate(ModelSpec.from_module(Model()), TrainSpec(seq_len=8), Plan(dp_shard=2), cluster)
    assert any("no architecture facts" in note for note in coarse.not_modelled)
    exact = estimate(ModelSpec.from_module(llama()), TrainSpec(seq_len=8), Plan(dp_shard=2), cluster)
    assert exact.not_modelled == ()


def test_the_coarse_rule_is_near_the_exact_one() -> None:
    """Within a third of the block-by-block rules, on the model both can read."""
    import dataclasses

    from lightning_shard.activations import block_activations

    spec = ModelSpec.from_module(llama())
    train = TrainSpec(seq_len=32)
    exact = block_activations(spec, spec.blocks[0], train).kept_bytes
    blind = dataclasses.replace(spec, architecture=None)
    assert block_activations(blind, blind.blocks[0], train).kept_bytes == pytest.approx(exact, rel=0.34)
