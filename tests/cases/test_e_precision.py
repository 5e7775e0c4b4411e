"""In which type things are stored, computed and reduced (cases E1 to E6)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.llama import TinyLlama, make_llama, make_tokens
from helpers.regression import Regression, make_vectors
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import lora
from lightning_shard.testing import assert_parity, ranks, run_ranks, run_trainer

STRATEGIES = ["tuned-ddp", "fsdp2", "auto-shard"]
PRECISIONS = ["32-true", "bf16-true", "bf16-mixed"]
FP32, BF16 = torch.float32, torch.bfloat16


class HalfLoadedLlama(TinyLlama):
    """LoRA on a base that was loaded in bf16, as fine-tuning does."""

    def __init__(self, **lora_options: Any) -> None:
        self.lora_options = lora_options
        super().__init__("lora")

    def _build(self) -> None:
        base = make_llama().to(BF16)
        self.model = lora(base, r=4, seed=7, **self.lora_options)


class LookAround(Callback):
    """Types of parameters, gradients and optimizer state, and the bytes that this rank holds."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        named = dict(module.named_parameters())
        self.dtypes = {name: parameter.dtype for name, parameter in named.items()}
        self.trained = {name for name, parameter in named.items() if parameter.requires_grad}
        self.frozen = set(named) - self.trained
        self.buffers = {name: buffer.dtype for name, buffer in module.named_buffers()}

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        self.grads = {name: p.grad.dtype for name, p in module.named_parameters() if p.grad is not None}
        self.held_bytes = {
            kind: sum(local(p).nbytes for p in module.parameters() if p.requires_grad == (kind == "trained"))
            for kind in ("trained", "frozen")
        }

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        (optimizer,) = trainer.optimizers
        self.states = list(optimizer.state.values())


def local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def look(make: Any, data: Any, strategy: str, precision: str, **options: Any) -> LookAround:
    seen = LookAround()
    run_trainer(make, data, strategy=strategy, precision=precision, callbacks=[seen], max_steps=2, **options)
    return seen


# --- E1: two types among what trains -------------------------------------------------------------------------


class TwoTypes(HalfLoadedLlama):
    def _build(self) -> None:
        super()._build()
        for name, parameter in self.model.named_parameters():
            if "layernorm" in name:
                parameter.requires_grad_(True)


class SavedHead(HalfLoadedLlama):
    def __init__(self) -> None:
        super().__init__(modules_to_save=["lm_head"])


WITH_TWO_TYPES = pytest.mark.parametrize("precision", PRECISIONS)


@WITH_TWO_TYPES
@pytest.mark.parametrize("make", [TwoTypes, SavedHead])
def test_e1_trained_bf16_beside_fp32_adapters_is_promoted(make: Any, precision: str) -> None:
    run_ranks(2, expect_fp32_trainables, make, precision)


def expect_fp32_trainables(make: Any, precision: str) -> None:
    seen = look(make, make_tokens, "fsdp2", precision)
    assert any("norm" in name or "lm_head" in name for name in seen.trained)
    assert {seen.dtypes[name] for name in seen.trained} == {FP32}
    assert set(seen.grads.values()) == {FP32}


@WITH_TWO_TYPES
@pytest.mark.parametrize("make", [TwoTypes, SavedHead])
def test_e1_both_layouts_learn_the_same_with_two_types(make: Any, precision: str) -> None:
    options = {"precision": precision, "max_steps": 3}
    expected, *_ = run_ranks(2, run_trainer, make, make_tokens, strategy="tuned-ddp", **options)
    for result in run_ranks(2, run_trainer, make, make_tokens, strategy="fsdp2", **options):
        assert_parity(result, expected)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("make", [TinyLlama, HalfLoadedLlama], ids=["full", "lora"])
def test_both_layouts_learn_the_same_in_every_precision(make: Any, precision: str) -> None:
    options = {"precision": precision, "max_steps": 5, "gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    expected, *_ = run_ranks(2, run_trainer, make, make_tokens, strategy="tuned-ddp", **options)
    in_fp32 = make is TinyLlama and precision == "32-true"
    tolerance = {"rtol": 1e-5} if in_fp32 else {"rtol": 5e-2, "loss_rtol": 1e-4}  # bf16 rounds at 4e-3
    for result in run_ranks(2, run_trainer, make, make_tokens, strategy="fsdp2", **options):
        assert_parity(result, expected, **tolerance)


# --- E2, E4, E6: masters, optimizer state and bytes ------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_e2_masters_survive_bf16_true(strategy: str) -> None:
    seen = look(HalfLoadedLlama, make_tokens, strategy, "bf16-true")
    assert seen.trained
    assert {seen.dtypes[name] for name in seen.trained} == {FP32}
    assert {seen.dtypes[name] for name in seen.frozen} == {BF16}
    assert set(seen.grads.values()) == {FP32}


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_e2_rotary_frequencies_stay_fp32(strategy: str) -> None:
    seen = look(TinyLlama, make_tokens, strategy, "bf16-true")
    assert {dtype for name, dtype in seen.buffers.items() if "inv_freq" in name} == {FP32}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("make", [TinyLlama, HalfLoadedLlama], ids=["full", "lora"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_e4_optimizer_state_is_fp32(strategy: str, make: Any, precision: str) -> None:
    seen = look(make, make_tokens, strategy, precision)
    assert len(seen.states) == len(seen.trained)
    assert {state[key].dtype for state in seen.states for key in ("exp_avg", "exp_avg_sq")} == {FP32}


@ranks(2)
def test_e6_a_frozen_base_takes_two_bytes_and_its_share() -> None:
    seen = look(HalfLoadedLlama, make_tokens, "fsdp2", "bf16-true")
    model = HalfLoadedLlama()
    sizes = {
        kind: sum(p.numel() for p in model.parameters() if p.requires_grad == (kind == "trained"))
        for kind in ("trained", "frozen")
    }
    assert seen.held_bytes["frozen"] == 2 * sizes["frozen"] // dist.get_world_size()
    assert seen.held_bytes["trained"] == 4 * sizes["trained"] // dist.get_world_size()


# --- E3: small updates ---------------------------------------------------------------------------------------------


class OneWeight(LightningModule):
    """One weight at 1.0 whose gradient is always 1: a whole weight, or the B of an adapter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        net: Any = nn.Sequential(nn.Linear(1, 1, bias=False))
        if kind == "lora":
            net = lora(net, r=1, lora_alpha=1, target_modules=["0"])
        for name, parameter in net.named_parameters():
            nn.init.ones_(parameter)
            parameter.requires_grad_("lora_A" not in name and parameter.requires_grad)
        self.net = net

    def training_step(self, batch: Sequence[Tensor], _: int) -> Tensor:
        result: Tensor = self.net(batch[0]).mean()
        return result

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)


def make_ones(rank: int, world_size: int) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(torch.ones(100, 1)), batch_size=1)


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_e3_a_hundred_small_updates_arrive(strategy: str, kind: str) -> None:
    make = partial(OneWeight, kind)
    results = run_ranks(2, run_trainer, make, make_ones, strategy=strategy, precision="bf16-true", max_steps=100)
    for result in results:
        (weight,) = result.parameters.values()
        assert weight.dtype == FP32
        assert weight.item() == pytest.approx(0.9, abs=1e-4)


def test_e3_in_bf16_weights_they_would_not() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=BF16))
    optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.0)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weight.item() == 1.0


# --- E5: mixed precision -----------------------------------------------------------------------------------------


class MixedTypes(Regression):
    """Built in ``configure_model``, under whatever context Lightning has there."""

    def __init__(self) -> None:
        super().__init__()
        self.make_net, self.net = None, None  # type: ignore[assignment]
        self.at_birth: set[torch.dtype] = set()
        self.computed: set[torch.dtype] = set()

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Regression().net
            self.at_birth = {parameter.dtype for parameter in self.net.parameters()}
            self.net[0][0].up.register_forward_hook(lambda *call: self.computed.add(call[-1].dtype))


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_e5_mixed_precision_stores_fp32_and_computes_bf16(strategy: str) -> None:
    module = MixedTypes()
    seen = look(lambda: module, make_vectors, strategy, "bf16-mixed")
    assert module.at_birth == {FP32}
    assert set(seen.dtypes.values()) == {FP32}
    assert module.computed == {BF16}


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_e5_bf16_true_computes_bf16(strategy: str) -> None:
    module = MixedTypes()
    seen = look(lambda: module, make_vectors, strategy, "bf16-true")
    assert set(seen.dtypes.values()) == {FP32}
    assert module.computed == {BF16}
