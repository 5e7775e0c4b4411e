"""Tensor parallelism in the planner: what one rank holds and sums, against the simulated step, and when it is chosen."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hand_specs import GIB, LLAMA_8B, LLAMA_70B, TP_PLAN, cluster
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from lightning_shard.planner import choose, estimate
from lightning_shard.plans import Plan
from lightning_shard.simulate import Simulation, simulate
from lightning_shard.specs import AdapterSpec, ModelSpec, TrainSpec

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "use_cache": False,
}
BUILDS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "few-words": lambda: LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": 256})),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True)),
    "phi": lambda: PhiForCausalLM(PhiConfig(**{**SIZES, "num_key_value_heads": 8})),
}
PLANS = {
    "tp": Plan(tp=2),
    "tp4-x-shards": Plan(tp=4, dp_shard=2),
    "tp-x-replicas": Plan(tp=2, dp_replicate=2),
    "tp-x-hsdp": Plan(tp=2, dp_shard=2, dp_replicate=2),
}
LORA = AdapterSpec(r=8)


def spec_of(build: Callable[[], nn.Module]) -> ModelSpec:
    with torch.device("meta"):
        return ModelSpec.from_module(build(), name="tiny")


@functools.cache
def simulated_step(build: Callable[[], nn.Module], train: TrainSpec, plan: Plan) -> Simulation:
    """Once for a plan and for the replicas of it."""
    return simulate(build, train, plan)


def agree(build: Callable[[], nn.Module], train: TrainSpec, plan: Plan) -> None:
    """Memory within 5 %, bytes sent exactly, save for labels that a chunked loss leaves out: a sum of n ranks sends
    2 (n-1)/n of its bytes, and so on.
    """
    simulated, analytic = simulated_step(build, train, plan), estimate(spec_of(build), train, plan, cluster())
    assert analytic.allocated_bytes == pytest.approx(simulated.allocated_bytes, rel=0.05)
    one_copy = simulated_step(build, train, dataclasses.replace(plan, dp_replicate=1))
    summed = next(row.num_bytes for row in one_copy.collectives if row.kind == "all_reduce")
    vocabulary = 2048 if build is not BUILDS["few-words"] else 256
    joined = 2 * 512 * (vocabulary if train.loss == "full" else 4 * plan.tp)  # bf16 logits, or two FP32 numbers
    ranks = {"all_reduce": plan.dp_replicate, "all_gather": plan.dp_shard, "reduce_scatter": plan.dp_shard}
    sent = (2 * summed + joined) * (plan.tp - 1) / plan.tp
    for row in simulated.collectives:
        is_sum = row.kind == "all_reduce"
        size = row.num_bytes - (summed if is_sum else joined if row.kind == "all_gather" else 0)
        sent += (2 if is_sum else 1) * size * (ranks[row.kind] - 1) / ranks[row.kind]
    assert math.isclose(analytic.comm_bytes, sent, rel_tol=1e-6 if train.loss == "full" else 1e-3)


@pytest.mark.parametrize(
    ("plan", "wishes"),
    [
        ("tp", {"adapter": AdapterSpec(r=8, target_modules=("q_proj", "lm_head"))}),
        ("tp4-x-shards", {}),
        pytest.param("tp", {"adapter": LORA, "loss": "chunked"}, marks=pytest.mark.slow),
        pytest.param("tp", {"adapter": AdapterSpec(r=8, method="dora")}, marks=pytest.mark.slow),
        pytest.param("tp4-x-shards", {"adapter": AdapterSpec(r=8, method="dora", dropout=0.1)}, marks=pytest.mark.slow),
        pytest.param("tp", {"adapter": AdapterSpec(target_modules=("q_proj",), modules_to_save=("lm_head",))},
                     marks=pytest.mark.slow),
    ],
    ids=["lora", "full", "chunked", "dora", "dora-dropout", "saved"],
)  # fmt: skip
def test_llama_agrees_with_the_simulated_step(plan: str, wishes: dict[str, Any]) -> None:
    agree(BUILDS["llama"], TrainSpec(seq_len=256, micro_batch_size=2, **wishes), PLANS[plan])


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("adapter", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("build", BUILDS)
def test_families_agree_with_the_simulated_step(
    build: str, plan: str, adapter: AdapterSpec | None, policy: str
) -> None:
    train = TrainSpec(seq_len=256, micro_batch_size=2, adapter=adapter)
    agree(BUILDS[build], train, dataclasses.replace(PLANS[plan], activation_checkpoint=policy))  # type: ignore[arg-type]


def test_each_rank_holds_its_part_of_blocks_and_vocabulary_and_the_rest_whole() -> None:
    train = TrainSpec(seq_len=512)
    one, four = (estimate(LLAMA_8B, train, Plan(tp=tp), cluster()) for tp in (1, 4))
    linears = 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
    tables = 2 * 128256 * 4096
    norms = LLAMA_8B.num_parameters - linears - tables
    assert norms == (2 * 32 + 1) * 4096
    assert one.terms["trained_weights"] == 4 * LLAMA_8B.num_parameters
    assert four.terms["trained_weights"] == 4 * ((linears + tables) // 4 + norms)
    assert four.load_peak_bytes > four.terms["trained_weights"]  # a table is whole while it is loaded


def test_a_vocabulary_that_does_not_divide_stays_whole() -> None:
    train = TrainSpec(seq_len=512)
    odd, even = (
        spec_of(lambda: LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": 2049}))),
        spec_of(BUILDS["llama"]),
    )
    whole, split = (estimate(spec, train, Plan(tp=2), cluster()) for spec in (odd, even))
    assert whole.terms["trained_weights"] - split.terms["trained_weights"] == 4 * (2 * 2049 - 2048) * 256
    ends, logits = 2 * 2 * 512 * 256, 2 * 512 * 2048
    assert split.comm_bytes - whole.comm_bytes == ends + logits // 2
    decision = choose(odd, train, cluster(), pin={"tp": 2})
    said = next(answer.answer for answer in decision.checklist if answer.topic == "tensor parallel")
    assert "all of the vocabulary (2 does not divide its 2049 rows: pad them)" in said


def test_sums_are_seven_of_the_hidden_size_per_block_and_two_of_the_vocabulary_and_hide_nowhere() -> None:
    train = TrainSpec(seq_len=4096)
    one, two = (estimate(LLAMA_8B, train, Plan(tp=tp), cluster()) for tp in (1, 2))
    assert one.comm_bytes == 0
    sums, logits = (32 * 7 + 2) * 2 * 4096 * 4096, 2 * 4096 * 128256  # bf16
    assert two.comm_bytes == sums + logits // 2  # 2 (n-1)/n = 1 of a sum, half of that of a gather
    assert two.step_s - two.compute_s >= two.comm_s
    assert two.tokens_per_s == pytest.approx(4096 / two.step_s)


@pytest.mark.parametrize(
    ("make", "tp", "message"),
    [
        (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), 8, "tp=8 does not divide the 4 key-value heads"),
        (lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=8)), 2, "says no way to split"),
        (
            lambda: Phi3ForCausalLM(Phi3Config(**{**SIZES, "pad_token_id": 0})),
            2,
            "asks for colwise_gather_output, rowwise_split_input",
        ),
        (
            lambda: MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2)),
            2,
            "asks for moe_tp_experts, packed_colwise",
        ),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 2, "says no way to split"),
    ],
)  # fmt: skip
def test_what_the_engine_refuses_is_refused_with_the_reason(make: Any, tp: int, message: str) -> None:
    spec = spec_of(make)
    with pytest.raises(ValueError, match=f"tp={tp} cannot be carried out: .*{message}"):
        choose(spec, TrainSpec(seq_len=64), cluster(), pin={"tp": tp})
    free = choose(spec, TrainSpec(seq_len=64), cluster())
    assert all(row.plan.tp != tp for row in (free, *free.rejected))


@pytest.mark.parametrize(
    ("wishes", "policy", "added"),
    [
        ({}, "none", 32 * 2 * 4 * 4096),  # squares for each output of attention and MLP, FP32
        ({}, "full", 2 * 32 * 2 * 4 * 4096),
        # Each layer once more on its adapter's own input: two outputs forward, five inputs' gradients; three of those in
        # the first block have none.
        ({"dropout": 0.1}, "none", 32 * 2 * 4 * 4096 + (32 * 7 - 3) * 2 * 4096 * 512),
    ],
    ids=["norms", "recomputed", "dropout"],
)
def test_dora_sums_the_squares_of_split_rows(wishes: dict[str, Any], policy: Any, added: int) -> None:
    plan = Plan(tp=2, activation_checkpoint=policy)
    lora, dora = (
        estimate(LLAMA_8B, TrainSpec(seq_len=512, adapter=AdapterSpec(method=method, **wishes)), plan, cluster())
        for method in ("lora", "dora")
    )
    assert dora.comm_bytes - lora.comm_bytes == added  # 2 (n-1)/n = 1 of a sum
    magnitudes = 32 * (4096 + 2 * 1024 + 2 * 14336) // 2 + 32 * 2 * 4096
    assert dora.terms["trained_weights"] - lora.terms["trained_weights"] == 4 * magnitudes


def test_every_valid_layout_is_weighed_and_none_else() -> None:
    decision = choose(LLAMA_8B, TrainSpec(seq_len=2048, adapter=LORA), cluster(devices=8, nodes=2))
    plans = [decision.plan, *(row.plan for row in decision.rejected)]
    found = {(plan.dp_replicate, plan.dp_shard, plan.tp) for plan in plans}
    sizes = (1, 2, 4, 8, 16)
    assert found == {(r, s, t) for r in sizes for s in sizes for t in (1, 2, 4, 8) if r * s * t == 16}
    split = [plan for plan in plans if plan.tp > 1]
    assert all(plan.adapters == "sharded" and not plan.resident_blocks for plan in split)


def test_layers_are_split_only_where_nothing_else_fits() -> None:
    """Ranks that split layers see the same data: a step would learn from fewer sequences."""
    train = TrainSpec(seq_len=512, adapter=AdapterSpec(r=16))
    roomy, tight = (choose(LLAMA_70B, train, cluster(memory_gib=memory)) for memory in (80, 32))
    assert roomy.fits
    assert roomy.plan.tp == 1
    assert tight.fits
    assert tight.plan.tp > 1
    assert f"split over {tight.plan.tp} ranks that see the same data" in tight.reason
    whole = [row for row in tight.rejected if row.plan.tp == 1]
    assert min(row.device_bytes for row in whole) > tight.limit_bytes


def test_a_pinned_size_is_taken() -> None:
    decision = choose(LLAMA_8B, TrainSpec(seq_len=2048), cluster(), pin={"tp": 4})
    assert decision.plan.tp == 4
    assert decision.plan.world_size == 8
    assert all(row.plan.tp == 4 for row in decision.rejected)


def test_a_faster_split_plan_says_what_it_would_change() -> None:
    decision = choose(LLAMA_70B, TrainSpec(seq_len=2048), cluster(devices=8, nodes=16))
    assert decision.plan.tp == 1
    for row in decision.rejected:
        if row.plan.tp > 1 and row.device_bytes <= decision.limit_bytes:
            assert "tokens/s against" in row.reason


def test_a_spec_from_before_has_no_way_to_split() -> None:
    values = LLAMA_8B.to_dict()
    del values["tp_plan"]
    old = ModelSpec.from_dict(values)
    assert old.tp_plan == ()
    assert ModelSpec.from_dict(LLAMA_8B.to_dict()).tp_plan == TP_PLAN
    with pytest.raises(ValueError, match="a spec saved by an earlier version holds none"):
        choose(old, TrainSpec(seq_len=64), cluster(memory_gib=2 * GIB / GIB), pin={"tp": 2})
