"""Initialisation, the meta device and seeds (cases F1 to F5)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.llama import TinyLlama, llama_config, make_llama, make_tokens
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

from lightning_shard import lora
from lightning_shard.testing import ranks, run_ranks, run_trainer

STRATEGIES = ["tuned-ddp", "fsdp2", "auto-shard"]


class KeepStart(Callback):
    """Every parameter and buffer, whole, before the first step; and the first logits."""

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.tensors = {name: full(value) for name, value in module.named_parameters()}
        self.tensors |= {name: full(value) for name, value in module.named_buffers()}


def full(value: Tensor) -> Tensor:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().clone()


def start_of(make: Callable[[], LightningModule], strategy: str) -> dict[str, Tensor]:
    keep = KeepStart()
    run_trainer(make, make_tokens, strategy=strategy, callbacks=[keep], max_steps=1)
    return keep.tensors


# --- F1: ranks that start differently ---------------------------------------------------------------------------


class RankSeeded(TinyLlama):
    """Adapters, base and a buffer drawn from a seed that depends on the rank."""

    def __init__(self, through: str) -> None:
        self.through = through
        super().__init__("lora")

    def _build(self) -> None:
        import peft

        rank = dist.get_rank()
        torch.manual_seed(100 + rank)
        base = LlamaForCausalLM(llama_config())
        if self.through == "peft":
            config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights="gaussian")
            self.model = peft.get_peft_model(base, config)
        else:
            self.model = lora(base, r=4)
        self.register_buffer("noise", torch.rand(3))


def start_and_own(through: str, strategy: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    module = RankSeeded(through)
    own = {name: value.detach().clone() for name, value in [*module.named_parameters(), *module.named_buffers()]}
    return start_of(lambda: module, strategy), own


@pytest.mark.parametrize("through", ["peft", "lightning_shard"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_f1_every_rank_starts_where_rank_0_does(strategy: str, through: str) -> None:
    (start, first), (other_start, other) = run_ranks(2, start_and_own, through, strategy)
    assert not torch.equal(first["noise"], other["noise"])
    assert {name for name, value in first.items() if "lora_A" in name and torch.equal(value, other[name])} == set()
    for name, wanted in first.items():
        assert torch.equal(start[name], wanted), name
        assert torch.equal(other_start[name], wanted), name


class SeededByRun(TinyLlama):
    """Takes its start from the run's seed alone."""

    def __init__(self, device: str) -> None:
        self.device_of_birth = device
        super().__init__("lora")

    def _build(self) -> None:
        torch.manual_seed(5)
        with torch.device(self.device_of_birth):
            self.model = lora(LlamaForCausalLM(llama_config()), r=4)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_f1_adapters_start_the_same_on_any_topology(device: str) -> None:
    make = partial(SeededByRun, device)
    (expected,) = run_ranks(1, start_of, make, "tuned-ddp")
    assert any(value.any() for name, value in expected.items() if "lora_A" in name)
    for num_ranks, strategy in ((2, "tuned-ddp"), (2, "fsdp2"), (4, "fsdp2"), (2, "auto-shard")):
        for start in run_ranks(num_ranks, start_of, make, strategy):
            assert start.keys() == expected.keys()
            for name, wanted in expected.items():
                assert torch.equal(start[name], wanted), (num_ranks, strategy, name)


# --- F2, F3, F4: from the meta device -------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_f2_f3_f4_what_is_born_on_meta_starts_as_it_should(strategy: str) -> None:
    for start in run_ranks(2, start_of, partial(SeededByRun, "meta"), strategy):
        assert max(float(value.abs().max()) for name, value in start.items() if "lora_B" in name) == 0.0
        norms = [value for name, value in start.items() if "norm" in name]
        assert norms
        assert all(torch.equal(norm, torch.ones_like(norm)) for norm in norms)
        frequencies = [value for name, value in start.items() if "inv_freq" in name]
        assert frequencies
        for frequency in frequencies:
            torch.testing.assert_close(frequency, torch.tensor([1.0, 0.1, 0.01, 0.001]))
        assert all(bool(value.isfinite().all()) for value in start.values())


class AdapterOff(SeededByRun):
    """Looks at the model's first logits with and without the adapter."""

    def on_train_start(self) -> None:
        tokens = torch.tensor([[3, 1, 4, 1, 5]])
        with torch.no_grad():
            adapted = self.model(tokens).logits
            with self.model.disable_adapter():
                plain = self.model(tokens).logits
        assert adapted.abs().max() > 0
        assert torch.equal(adapted, plain)


@pytest.mark.parametrize("strategy", STRATEGIES)
@ranks(2)
def test_f2_a_fresh_adapter_changes_nothing(strategy: str) -> None:
    run_trainer(partial(AdapterOff, "meta"), make_tokens, strategy=strategy, max_steps=1)


class LoadedOverMeta(TinyLlama):
    """Weights arrive in ``configure_model`` from a file that holds no inverse frequencies."""

    def __init__(self) -> None:
        super().__init__(late=True)

    def _build(self) -> None:
        state: dict[str, Any] = make_llama().state_dict()
        assert not any("inv_freq" in name for name in state)
        with torch.device("meta"):
            self.model = LlamaForCausalLM(llama_config())
        self.model.load_state_dict(state, assign=True)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_f4_loaded_weights_are_kept_and_missing_buffers_made(strategy: str) -> None:
    wanted = make_llama().state_dict()
    for start in run_ranks(2, start_of, LoadedOverMeta, strategy):
        for name, value in wanted.items():
            assert torch.equal(start[f"model.{name}"], value), name
        torch.testing.assert_close(start["model.model.rotary_emb.inv_freq"], torch.tensor([1.0, 0.1, 0.01, 0.001]))


# --- F5: weights on rank 0 only ----------------------------------------------------------------------------------


class LoadedOnOneRank(TinyLlama):
    def _build(self) -> None:
        with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
            super()._build()


def refusal(strategy: str) -> str:
    try:
        run_trainer(LoadedOnOneRank, make_tokens, strategy=strategy, max_steps=1)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("strategy", ["tuned-ddp", "fsdp2"])
def test_f5_weights_on_one_rank_alone_are_refused_on_all_with_the_way_out(strategy: str) -> None:
    """What loads without each rank holding all is in ``parallelize/test_streaming.py``."""
    for said in run_ranks(2, refusal, strategy):
        assert "'model.model.embed_tokens.weight' is (64, 32) float32, trains on rank 0" in said
        assert "on meta on rank 1" in said
        assert "lightning_shard.from_pretrained" in said
