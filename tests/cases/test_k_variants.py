"""Kinds of adapters and bases (cases K1, K2 and K3)."""

from functools import partial
from typing import Any

import pytest
import torch
from helpers.llama import TinyLlama, make_llama, make_tokens
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard import FSDP2Strategy, lora, lora_plus
from lightning_shard.testing import RankError, assert_parity, run_ranks, run_trainer

SMALL, RESIZED = 32, 40


# --- K1: a resized vocabulary -----------------------------------------------------------------------------


class Resized(TinyLlama):
    """The vocabulary grows from 32 to 40; embedding and head train whole beside the adapters."""

    def __init__(self, *, tied: bool, method: str = "lora") -> None:
        self.method = method
        super().__init__("lora", tied=tied)

    def _build(self) -> None:
        model = make_llama(tied=self.tied, vocab_size=SMALL)
        torch.manual_seed(5)
        model.resize_token_embeddings(RESIZED, mean_resizing=False)
        options: dict[str, Any] = {"ensure_weight_tying": True} if self.tied else {}
        saved = ["embed_tokens"] if self.tied else ["embed_tokens", "lm_head"]
        self.model = lora(
            model, r=4, seed=7, method=self.method, target_modules=["q_proj"], modules_to_save=saved, **options
        )

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return super().training_step([batch[0] % RESIZED], index)


LAYOUTS: dict[str, Any] = {
    "ddp": "tuned-ddp",
    "fsdp2": "fsdp2",
    "half-resident": partial(FSDP2Strategy, adapters="replicated", resident_blocks=1),
}


EVERY_LAYOUT = pytest.mark.parametrize(
    "layout", ["fsdp2", *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name != "fsdp2")]
)


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@EVERY_LAYOUT
def test_k1_a_resized_vocabulary_trains_with_its_copy_frozen(layout: str, tied: bool, precision: str) -> None:
    make = partial(Resized, tied=tied)
    options = {"max_steps": 3, "precision": precision}
    if precision == "32-true":
        expected, *_ = run_ranks(1, run_trainer, make, make_tokens, **options)
    else:
        expected, *_ = run_ranks(2, run_trainer, make, make_tokens, strategy="tuned-ddp", **options)
    saved = [name for name in expected.parameters if "modules_to_save" in name]
    assert saved
    assert all(expected.parameters[name].shape[0] == RESIZED for name in saved)
    assert not any("original_module" in name for name in expected.parameters)
    for result in run_ranks(2, run_trainer, make, make_tokens, strategy=LAYOUTS[layout], **options):
        # Autocast and FSDP's policy round at other places.
        assert_parity(result, expected, **({} if precision == "32-true" else {"rtol": 5e-2, "loss_rtol": 1e-3}))


# --- K2: DoRA -----------------------------------------------------------------------------------------------


class Dora(TinyLlama):
    def __init__(self) -> None:
        self.first: list[Tensor] = []
        super().__init__("lora")

    def _build(self) -> None:
        self.model = lora(make_llama(), r=4, seed=7, method="dora", target_modules=["q_proj", "down_proj"])

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (tokens,) = batch
        output = self.model(input_ids=tokens, labels=tokens)
        if not self.first:
            with torch.no_grad():
                self.first = [output.logits.detach(), make_llama()(input_ids=tokens).logits]
        loss: Tensor = output.loss
        return loss


def dora(strategy: Any) -> tuple[Any, float, set[tuple[int, ...]]]:
    module = Dora()
    result = run_trainer(lambda: module, make_tokens, strategy=strategy, max_steps=3)
    shapes = {tuple(value.shape) for name, value in result.parameters.items() if "magnitude" in name}
    return result, float((module.first[0] - module.first[1]).abs().max()), shapes


@EVERY_LAYOUT
def test_k2_dora_starts_at_the_base_and_trains_as_on_one_process(layout: str) -> None:
    ((expected, error, shapes),) = run_ranks(1, dora, "auto")
    assert shapes == {(32,)}
    for result, first_error, seen in run_ranks(2, dora, LAYOUTS[layout]):
        assert first_error < 1e-5
        assert seen == shapes
        assert_parity(result, expected)
    assert error < 1e-5


class Plus(TinyLlama):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(lora_plus(self, 1e-3, ratio=8.0), eps=1e-4)


@EVERY_LAYOUT
def test_lora_plus_learns_b_faster_under_every_layout(layout: str) -> None:
    make = partial(Plus, "lora")
    (expected,) = run_ranks(1, run_trainer, make, make_tokens, max_steps=3)
    (equal,) = run_ranks(1, run_trainer, partial(TinyLlama, "lora"), make_tokens, max_steps=3)

    def moved(result: Any) -> float:
        return sum(float(v.abs().sum()) for name, v in result.parameters.items() if "lora_B" in name)

    assert moved(expected) > 4 * moved(equal)
    for result in run_ranks(2, run_trainer, make, make_tokens, strategy=LAYOUTS[layout], max_steps=3):
        assert_parity(result, expected)


def test_lora_plus_needs_adapters() -> None:
    with pytest.raises(ValueError, match="has no trainable lora_B"):
        lora_plus(make_llama(), 1e-3)


# --- K3: a quantised base -----------------------------------------------------------------------------------


class Packed(nn.Module):
    """A frozen layer of packed bytes, as quantisers make them, with a scale for each row."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(dim=1, keepdim=True) / 127
        packed = (linear.weight.detach() / scale).round().to(torch.int8).view(torch.uint8)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.packed.view(torch.int8).to(x.dtype) * self.scale.to(x.dtype)
        return nn.functional.linear(x, weight)


class QuantisedBase(TinyLlama):
    def __init__(self) -> None:
        super().__init__("lora")

    def _build(self) -> None:
        model = make_llama()
        for layer in model.model.layers:
            layer.mlp.down_proj = Packed(layer.mlp.down_proj)
        self.model = lora(model, r=4, seed=7, target_modules=["q_proj", "v_proj"])


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@EVERY_LAYOUT
def test_k3_packed_bytes_stay_what_they_are(layout: str, precision: str) -> None:
    options = {"max_steps": 3, "precision": precision}
    expected, *_ = run_ranks(2, run_trainer, QuantisedBase, make_tokens, strategy="tuned-ddp", **options)
    assert all(0 < loss < 10 for loss in expected.losses)
    for result in run_ranks(2, run_trainer, QuantisedBase, make_tokens, strategy=LAYOUTS[layout], **options):
        assert_parity(result, expected, rtol=1e-5 if precision == "32-true" else 1e-2)


class TorchaoBase(TinyLlama):
    def __init__(self) -> None:
        super().__init__("lora")

    def _build(self) -> None:
        quantization = pytest.importorskip("torchao.quantization")
        model = make_llama()
        quantization.quantize_(model.model.layers, quantization.Int8WeightOnlyConfig())
        self.model = lora(model, r=4, seed=7, target_modules=["q_proj", "v_proj"])


ALL_RESIDENT = partial(FSDP2Strategy, adapters="replicated", resident_blocks=99)


def test_k3_torchaos_int8_weights_train_adapters_where_they_are_whole() -> None:
    pytest.importorskip("torchao")
    (expected,) = run_ranks(1, run_trainer, TorchaoBase, make_tokens, max_steps=3)
    for strategy in ("tuned-ddp", ALL_RESIDENT):
        for result in run_ranks(2, run_trainer, TorchaoBase, make_tokens, strategy=strategy, max_steps=3):
            assert_parity(result, expected)


def test_k3_torchaos_int8_weights_in_shards_are_refused_by_name() -> None:
    pytest.importorskip("torchao")
    with pytest.raises(RankError, match=r"q_proj.*is a .*Int8Tensor.*, which cannot be sharded"):
        run_ranks(2, run_trainer, TorchaoBase, make_tokens, strategy="fsdp2", max_steps=1)


class Experts(TinyLlama):
    """Adapters on the bare weights of a mixture's experts."""

    def __init__(self) -> None:
        super().__init__("lora")

    def _build(self) -> None:
        from transformers import MixtralConfig, MixtralForCausalLM

        torch.manual_seed(1)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
        config = MixtralConfig(**sizes, vocab_size=64, num_key_value_heads=2, num_local_experts=4, use_cache=False)
        targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        model = MixtralForCausalLM(config)
        self.model = lora(model, r=4, seed=7, target_modules=["q_proj"], target_parameters=targets)


HALF_RESIDENT = partial(FSDP2Strategy, resident_blocks=2)


def test_adapters_on_bare_parameters_train_in_every_layout_but_one_which_is_refused() -> None:
    (expected,) = run_ranks(1, run_trainer, Experts, make_tokens, max_steps=2)
    for strategy in ("tuned-ddp", "fsdp2", HALF_RESIDENT):
        for result in run_ranks(2, run_trainer, Experts, make_tokens, strategy=strategy, max_steps=2):
            assert_parity(result, expected)
    with pytest.raises(RankError, match="adapts the bare parameter"):
        run_ranks(2, run_trainer, Experts, make_tokens, strategy=HALF_RESIDENT, precision="bf16-mixed", max_steps=1)


def held(strategy: Any) -> dict[torch.dtype, int]:
    """Bytes of frozen parameters this rank holds, by type."""
    found: dict[torch.dtype, int] = {}

    class Look(QuantisedBase):
        def on_train_start(self) -> None:
            for parameter in self.parameters():
                if not parameter.requires_grad:
                    part = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                    found[part.dtype] = found.get(part.dtype, 0) + part.nbytes

    run_trainer(Look, make_tokens, strategy=strategy, max_steps=1)
    return found


def test_k3_packed_bytes_are_shared_out_too() -> None:
    whole = run_ranks(2, held, "tuned-ddp")[0]
    shares = run_ranks(2, held, "fsdp2")
    assert whole[torch.uint8] > 0
    assert [share[torch.uint8] for share in shares] == [whole[torch.uint8] // 2] * 2
