"""The same start on every rank and topology: agreement, materialisation, adapters."""

import pytest
import torch
import torch.distributed as dist
from helpers.llama import llama_config, make_llama
from torch import nn
from transformers import LlamaForCausalLM

from lightning_shard import lora
from lightning_shard.parallelize.agree import agree_on_start
from lightning_shard.parallelize.materialize import Materializer
from lightning_shard.testing import RankError, count_collectives, ranks, run_ranks

CPU = torch.device("cpu")


@ranks(2)
def test_equal_modules_cost_no_broadcast() -> None:
    torch.manual_seed(1)
    net = nn.Linear(4, 4)
    with count_collectives() as sent:
        assert agree_on_start(net, CPU) == 0
    assert sent["broadcast"] == 0


@ranks(2)
def test_only_what_differs_is_sent() -> None:
    torch.manual_seed(dist.get_rank())
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    assert agree_on_start(net, CPU) == 4 * (16 + 4)
    torch.manual_seed(0)
    torch.testing.assert_close(net[0].weight, nn.Linear(4, 4).weight, rtol=0, atol=0)


def build_by_rank() -> None:
    agree_on_start(nn.Linear(4, 4 + dist.get_rank()), CPU)


def test_ranks_that_built_different_modules_are_told() -> None:
    with pytest.raises(RankError, match="Rank 1 built a different module from rank 0.*'bias'|'weight'"):
        run_ranks(2, build_by_rank)


def build_in_another_order() -> None:
    layers = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}
    names = ["a", "b"] if dist.get_rank() == 0 else ["b", "a"]
    agree_on_start(nn.ModuleDict({name: layers[name] for name in names}), CPU)


def freeze_by_rank() -> None:
    agree_on_start(nn.Linear(4, 4).requires_grad_(dist.get_rank() == 0), CPU)


def test_ranks_that_registered_in_another_order_are_told() -> None:
    with pytest.raises(RankError, match="another order than rank 0, from 'b.weight' on"):
        run_ranks(2, build_in_another_order)


def test_ranks_that_froze_other_parts_are_told() -> None:
    with pytest.raises(RankError, match=r"rank 0: \(4, 4\) float32, trains, rank 1: \(4, 4\) float32\)"):
        run_ranks(2, freeze_by_rank)


def on_meta(**lora_options: object) -> nn.Module:
    with torch.device("meta"):
        return lora(LlamaForCausalLM(llama_config(tied=True)), r=4, **lora_options)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["lora", "rslora", "dora"])
def test_meta_models_start_as_their_base(method: str) -> None:
    model = on_meta(method=method)
    Materializer(model, seed=3).materialize(model)
    tokens = torch.arange(12)[None]
    model.eval()
    with torch.no_grad(), model.disable_adapter():  # type: ignore[operator]
        base = model(tokens).logits
    torch.testing.assert_close(model(tokens).logits, base)
    assert max(p.abs().max() for n, p in model.named_parameters() if "lora_B" in n) == 0


def test_materialising_part_by_part_gives_the_same_values() -> None:
    whole, parts = on_meta(), on_meta()
    Materializer(whole, seed=3).materialize(whole)
    materializer = Materializer(parts, seed=3)
    base = parts.get_base_model()  # type: ignore[operator]
    for part in (base.lm_head, *reversed(base.model.layers), parts):  # the tied head before its embedding
        materializer.materialize(part)
    for (name, a), (_, b) in zip(whole.state_dict().items(), parts.state_dict().items(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=name)


def test_ties_survive() -> None:
    model = on_meta()
    Materializer(model, seed=3).materialize(model)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight  # type: ignore[operator]


class Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def test_a_tensor_nobody_initialises_is_an_error() -> None:
    with torch.device("meta"):
        net = nn.Sequential(nn.Linear(3, 3), Forgetful())
    with pytest.raises(RuntimeError, match=r"1\.scale is on the meta device and Forgetful gives no way"):
        Materializer(net, seed=0).materialize(net)


def test_adapters_do_not_depend_on_what_was_drawn_before() -> None:
    first = lora(make_llama(), r=4, seed=5).state_dict()
    torch.randn(100)
    second = lora(make_llama(), r=4, seed=5).state_dict()
    other = lora(make_llama(), r=4, seed=6).state_dict()
    names = [name for name in first if "lora_A" in name]
    assert all(torch.equal(first[name], second[name]) for name in names)
    assert not any(torch.equal(first[name], other[name]) for name in names)


def test_only_adapters_train_in_fp32_over_a_bf16_base() -> None:
    model = lora(make_llama().to(torch.bfloat16), r=4)
    kinds = {("lora" in name, p.requires_grad, p.dtype) for name, p in model.named_parameters()}
    assert kinds == {(True, True, torch.float32), (False, False, torch.bfloat16)}


def test_targets_that_match_nothing_list_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"'qproj' match no layer of LlamaForCausalLM.*down_proj.*q_proj"):
        lora(make_llama(), target_modules=["qproj", "v_proj"])
    with pytest.raises(ValueError, match="method 'lorra' is not known. Use one of lora, rslora, dora"):
        lora(make_llama(), method="lorra")
