"""The chunked loss: equal to the full one, for every head and layout, with a chunk of logits in memory at most."""

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_model_folder, write_pairs
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    PhiConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from lightning_shard import FSDP2Strategy
from lightning_shard.finetune import CausalLM, InstructionData, linear_loss
from lightning_shard.finetune.linear_loss import LogitRule, follows_rule, head_loss
from lightning_shard.hardware import GPUS, Cluster, link_between_nodes, link_inside_node
from lightning_shard.memory.estimate import estimate_memory
from lightning_shard.planner.considered import inject
from lightning_shard.plans import Plan
from lightning_shard.simulate import simulate
from lightning_shard.specs import AdapterSpec, ModelSpec, TrainSpec
from lightning_shard.testing import run_ranks, run_trainer

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "soft-cap": Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=0.05),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=8),
    "logit-scale": CohereConfig(**SIZES, logit_scale=0.25),
    "logits-scaling": GraniteConfig(**SIZES, logits_scaling=8.0),
    "bias": PhiConfig(**SIZES),
    "gpt2": GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=96),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
}


def reference(head: nn.Module, hidden: torch.Tensor, targets: torch.Tensor, rule: LogitRule) -> torch.Tensor:
    return functional.cross_entropy(rule(head(hidden)).float(), targets, reduction="sum")


def gradients(loss_of: Any, head: nn.Module, rule: LogitRule, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 16, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, 40, (23,), generator=generator)
    loss = loss_of(head, hidden, targets, rule)
    (loss * 3).backward()
    found = [loss.detach(), hidden.grad, *(parameter.grad for parameter in head.parameters())]
    head.zero_grad()
    return [tensor for tensor in found if tensor is not None]


@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(scale=0.5, cap=2.0)], ids=["plain", "capped"])
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_loss_and_gradients_equal_those_of_all_logits(
    monkeypatch: pytest.MonkeyPatch, rule: LogitRule, frozen: bool, bias: bool, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(linear_loss, "CHUNK_TOKENS", 7)
    torch.manual_seed(1)
    head = nn.Linear(16, 40, bias=bias).to(dtype).requires_grad_(not frozen)
    tolerance = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    ours, theirs = gradients(head_loss, head, rule, dtype), gradients(reference, head, rule, dtype)
    assert len(ours) == 2 + (0 if frozen else 1 + bias)
    for mine, wanted in zip(ours, theirs, strict=True):
        assert mine.dtype == wanted.dtype or mine.dim() == 0
        torch.testing.assert_close(mine.double(), wanted.double(), rtol=tolerance, atol=tolerance * 3)


def test_no_tokens_give_zero_and_a_gradient_of_zero() -> None:
    head = nn.Linear(4, 8)
    hidden = torch.zeros(0, 4, requires_grad=True)
    loss = head_loss(head, hidden, torch.zeros(0, dtype=torch.long), LogitRule())
    loss.backward()
    assert loss.item() == 0.0
    assert head.weight.grad is not None
    assert not head.weight.grad.any()


def test_a_forward_that_fails_leaves_the_head_as_it_was() -> None:
    head = nn.Linear(4, 8)
    with pytest.raises(RuntimeError):
        head_loss(head, torch.zeros(3, 5), torch.zeros(3, dtype=torch.long), LogitRule())
    assert "forward" not in head.__dict__


def test_autocast_runs_the_product_in_the_narrow_type() -> None:
    head = nn.Linear(16, 40)
    hidden, targets = torch.randn(9, 16), torch.arange(9)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = head_loss(head, hidden, targets, LogitRule()), reference(head, hidden, targets, LogitRule())
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_models_own_logits_are_recognised(name: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    rule = LogitRule.of(model.config)
    assert follows_rule(model, rule)
    assert follows_rule(model.to("meta"), rule)
    if name in ("soft-cap", "logit-scale", "logits-scaling"):
        torch.manual_seed(0)
        assert not follows_rule(AutoModelForCausalLM.from_config(CONFIGS[name]), LogitRule())


def test_a_model_that_is_no_decoder_is_not_taken_for_one() -> None:
    config = T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, vocab_size=96, decoder_start_token_id=0)
    assert not follows_rule(T5ForConditionalGeneration(config), LogitRule())


# --- in a run --------------------------------------------------------------------------------------------------------

HEADS: dict[str, AdapterSpec | None] = {
    "full": None,
    "lora": AdapterSpec(r=4),
    "lora-on-head": AdapterSpec(r=4, target_modules=("q_proj", "lm_head")),
    "head-saved": AdapterSpec(r=4, target_modules=("q_proj",), modules_to_save=("lm_head",)),
}


class Plain(CausalLM):
    """Steps in proportion to the gradient: AdamW's first ones are its sign, which hides a factor and shows noise."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.3)


def run(
    folder: Path, loss: str, lora: AdapterSpec | None, strategy: Any, *, same_rows: bool = False, **options: Any
) -> Any:
    def make() -> CausalLM:
        torch.manual_seed(3)
        return Plain(str(folder / "model"), lora, loss=loss)  # type: ignore[arg-type]

    def batches(rank: int, ranks: int) -> Any:
        data = InstructionData(
            str(folder / "model"), str(folder / "train.jsonl"), max_seq_len=64, shuffle=False, pad_to_multiple=64
        )
        data.setup("fit")
        items = data.splits["train"].items
        rank, ranks = (0, 1) if same_rows else (rank, ranks)
        share = 4 // ranks
        batches = [data._collate(items[i + rank * share : i + (rank + 1) * share]) for i in range(0, 12, 4)]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_loss, "CHUNK_TOKENS", 7)
        return run_trainer(make, batches, strategy=strategy, max_steps=3, **options)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("strategy", [pytest.param("tuned-ddp", marks=pytest.mark.slow), "fsdp2"])
@pytest.mark.parametrize("lora", HEADS)
def test_two_ranks_learn_what_one_learns_from_all_logits(tmp_path: Path, lora: str, strategy: str, tied: bool) -> None:
    if tied and lora in ("lora-on-head", "head-saved"):
        pytest.skip("tests/cases/test_k_lora.py: adapters on one half of a tie")
    make_model_folder(tmp_path / "model", tied=tied)
    write_pairs(tmp_path / "train.jsonl", 12)
    (one,) = run_ranks(1, run, tmp_path, "full", HEADS[lora], "auto")
    for two in run_ranks(2, run, tmp_path, "chunked", HEADS[lora], strategy):
        assert one.parameters.keys() == two.parameters.keys()
        for name, value in one.parameters.items():
            torch.testing.assert_close(two.parameters[name], value, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("lora", ["full", "lora-on-head"])
def test_two_ranks_that_split_the_model_learn_the_same(tmp_path: Path, lora: str) -> None:
    """Under tensor parallelism both ranks see every row, and each has half of the head."""
    make_model_folder(tmp_path / "model")
    write_pairs(tmp_path / "train.jsonl", 12)
    (one,) = run_ranks(1, run, tmp_path, "full", HEADS[lora], "auto")
    for two in run_ranks(2, run, tmp_path, "chunked", HEADS[lora], split_in_two, same_rows=True):
        for name, value in one.parameters.items():
            torch.testing.assert_close(two.parameters[name], value, rtol=1e-4, atol=1e-5, msg=name)


def split_in_two() -> FSDP2Strategy:
    return FSDP2Strategy(Plan(tp=2))


VOCABULARY, TOKENS = 4096, 4096


def peak(folder: Path, loss: str, lora: AdapterSpec | None, plan: Plan) -> int:
    def make() -> CausalLM:
        return CausalLM(str(folder), lora, loss=loss)  # type: ignore[arg-type]

    batch = {name: torch.zeros(1, TOKENS, dtype=torch.long) for name in ("input_ids", "labels")}
    return simulate(make, TrainSpec(seq_len=TOKENS, precision="bf16-true"), plan, batch=batch).allocated_bytes


@pytest.mark.parametrize("plan", [pytest.param(Plan(), marks=pytest.mark.slow), Plan(dp_shard=2)], ids=["one", "fsdp2"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("lora", [None, AdapterSpec(r=4)], ids=["full", "lora"])
def test_the_logits_of_all_tokens_never_exist(tmp_path: Path, lora: Any, tied: bool, plan: Plan) -> None:
    config = LlamaConfig(
        **{**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": TOKENS}, tie_word_embeddings=tied
    )
    config.save_pretrained(tmp_path)
    all_logits, chunk = 4 * VOCABULARY * TOKENS, 4 * VOCABULARY * linear_loss.CHUNK_TOKENS
    full, chunked = (peak(tmp_path, loss, lora, plan) for loss in ("full", "chunked"))
    assert full > 2 * all_logits
    assert chunked < all_logits
    assert chunked > chunk


@pytest.mark.slow
@pytest.mark.parametrize("plan", [Plan(), Plan(dp_shard=2)], ids=["one", "fsdp2"])
@pytest.mark.parametrize("lora", [None, AdapterSpec(r=16)], ids=["full", "lora"])
def test_the_estimate_knows_the_chunked_loss(lora: AdapterSpec | None, plan: Plan) -> None:
    folder = Path(__file__).parents[1] / "planner" / "configs" / "smollm2-135m"
    train = TrainSpec(
        micro_batch_size=4,
        seq_len=2048,
        precision="bf16-true",
        optimizer_implementation="fused",
        loss="chunked",
        gradients_cleared="before_backward",
    )
    batch = {name: torch.zeros(4, 2048, dtype=torch.long) for name in ("input_ids", "labels")}
    simulated = simulate(lambda: CausalLM(str(folder), lora), train, plan, batch=batch).allocated_bytes
    wish = dataclasses.replace(train, adapter=lora)
    model = inject(ModelSpec.from_pretrained(folder).with_storage("bfloat16"), wish)
    row = GPUS[0]
    links = {"intra_link": link_inside_node(row.intra_link), "inter_link": link_between_nodes(row.intra_link)}
    cluster = Cluster(devices_per_node=plan.world_size, device=row, accelerator="gpu", **links)
    estimated = estimate_memory(model, wish, plan, cluster)
    assert estimated.allocated_bytes == pytest.approx(simulated, rel=0.02)


def test_liger_gets_what_its_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments and reduction, with a stand-in: its kernels need a GPU."""

    class Kernel:
        def __init__(self, reduction: str) -> None:
            assert reduction == "sum"

        def __call__(self, weight: Any, hidden: Any, targets: Any, bias: Any) -> torch.Tensor:
            return functional.cross_entropy(functional.linear(hidden, weight, bias), targets, reduction="sum")

    package = types.ModuleType("liger_kernel.transformers")
    package.LigerFusedLinearCrossEntropyLoss = Kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)
    head, hidden, targets = nn.Linear(16, 40), torch.randn(9, 16), torch.arange(9)
    ours = head_loss(head, hidden, targets, LogitRule(), liger=True)
    torch.testing.assert_close(ours, reference(head, hidden, targets, LogitRule()))
    assert not head_loss(head, hidden[:0], targets[:0], LogitRule(), liger=True).any()
