"""The doctor finds what would waste a run, says the same on every rank, and keeps quiet otherwise."""

import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.llama import TinyLlama, make_tokens
from helpers.regression import Regression, block_net, make_vectors
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EMAWeightAveraging,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from torch import nn

from lightning_shard import FSDP2Strategy, TunedDDPStrategy
from lightning_shard.doctor import Doctor, DoctorError, Finding
from lightning_shard.doctor.finding import merge
from lightning_shard.doctor.model import check_optimizers, check_tensors
from lightning_shard.testing import run_ranks
from lightning_shard.testing.parity import QUIET

STRATEGIES = ["tuned-ddp", "fsdp2", "auto-shard"]


def examine(
    make: Callable[[], Any], strategy: Any, *callbacks: Any, data: Any = make_vectors, **options: Any
) -> list[Any]:
    """What the strategy's own doctor finds in a run of four steps, and the error it stopped with."""
    module = make()
    strategy = strategy if isinstance(strategy, str) else strategy()
    made = [callback if isinstance(callback, Callback) else callback() for callback in callbacks]
    trainer = Trainer(
        **{
            **QUIET,
            "strategy": strategy,
            "devices": dist.get_world_size(),
            "max_steps": 4,
            "callbacks": made,
            **options,
        }
    )
    error = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer.fit(module, data(dist.get_rank(), dist.get_world_size()))
        except DoctorError as caught:
            error = str(caught)
    doctor = next(callback for callback in trainer.callbacks if isinstance(callback, Doctor))  # type: ignore[attr-defined]
    return [[finding.to_dict() for finding in doctor.findings], error]


def found(*args: Any, num_ranks: int = 2, **options: Any) -> list[Any]:
    """The same, once it is the same on all ranks."""
    first, *others = run_ranks(num_ranks, examine, *args, **options)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sound_run_is_told_nothing(strategy: str) -> None:
    assert found(partial(TinyLlama, "lora"), strategy, data=make_tokens) == [[], None]


class AddsLate(Callback):
    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.late = nn.Linear(2, 2)


class UnfreezesLate(Callback):
    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.net[1].requires_grad_(True)


def half_frozen() -> Regression:
    module = Regression()
    module.net[1].requires_grad_(False)
    return module


def test_a1_what_no_reduction_covers_is_an_error() -> None:
    """Under torch's DDP, whose wrapper is blind to what comes later; other layouts see to it themselves."""
    ddp = partial(TunedDDPStrategy, static_graph=True)
    findings, error = found(Regression, ddp, AddsLate)
    assert "no gradient reduction covers them; the first is 'late.weight'" in error
    assert {finding["check"] for finding in findings} >= {"gradient reduction", "optimizer"}


class Idle(Regression):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net[0].parameters(), lr=0.1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_trains_and_is_in_no_optimizer_is_a_warning(strategy: str) -> None:
    findings, error = found(Idle, strategy)
    assert error is None
    assert [(f["level"], f["check"]) for f in findings] == [("warning", "optimizer")]
    assert "net.1.weight, net.1.bias: trainable, but in no optimizer" in findings[0]["what"]


class Drifts(Callback):
    def on_before_zero_grad(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        if dist.get_rank() == 1:
            with torch.no_grad():
                pl_module.net[1].bias += 1e-3


def test_copies_that_drift_in_the_first_step_are_an_error() -> None:
    _, error = found(Regression, "tuned-ddp", Drifts)
    assert "1 trainable parameters differ between ranks after the first step: net.1.bias" in error


def test_copies_of_shards_are_compared_too() -> None:
    """HSDP: ranks 0 and 2 hold the same shard."""
    strategy = partial(FSDP2Strategy, dp_shard=2)
    assert found(Regression, strategy, num_ranks=4) == [[], None]
    _, error = found(Regression, strategy, DriftsSharded, num_ranks=4)
    assert "differ between ranks after the first step: net.1.bias" in error


class DriftsSharded(Callback):
    def on_before_zero_grad(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        if dist.get_rank() == 2:
            with torch.no_grad():
                pl_module.net[1].bias.to_local().add_(1e-3)


class Odd(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(x * 0 - 1)


def net_with_nan() -> nn.Sequential:
    return nn.Sequential(block_net(), Odd(), nn.Linear(1, 1))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nan_is_traced_to_the_first_module_that_made_it(strategy: str) -> None:
    _, error = found(partial(Regression, net_with_nan), strategy)
    assert "are NaN or infinite in the first step. The first output that was not finite was that of net.1." in error


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad / 0


class BreaksBackward(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = BadBackward.apply(x)
        return result


def test_nan_of_backward_is_told_from_that_of_forward() -> None:
    _, error = found(partial(Regression, lambda_net), "tuned-ddp")
    assert "All outputs were finite: backward made it, and net.0.bias is where it met the first parameter" in error


def lambda_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 4), BreaksBackward(), nn.Linear(4, 1))


class HalfUsed(TinyLlama):
    """The last block's adapters take no part."""

    def training_step(self, batch: Any, index: int) -> Any:
        model = self.model.get_base_model()
        model.model.layers[-1].forward = skip
        return super().training_step(batch, index)


def skip(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden_states


def test_a9_adapters_without_gradients_are_a_warning() -> None:
    findings, error = found(partial(HalfUsed, "lora"), "fsdp2", data=make_tokens)
    assert error is None
    (finding,) = findings
    assert finding["check"] == "adapter gradients"
    assert "adapter weights got no gradient in the first steps" in finding["what"]
    assert "layers.2" in finding["what"]


class Started(TinyLlama):
    def _build(self) -> None:
        super()._build()
        for name, parameter in self.model.named_parameters():
            if "lora_B" in name:
                nn.init.ones_(parameter)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_f2_adapters_that_do_not_start_from_zero_are_a_warning(strategy: str) -> None:
    findings, error = found(partial(Started, "lora"), strategy, data=make_tokens)
    assert error is None
    assert [f["check"] for f in findings] == ["adapters"]
    assert "lora_B" in findings[0]["what"]
    assert "After loading a trained adapter that is as it should be" in findings[0]["why"]


def test_callbacks_that_fit_are_left_alone(tmp_path: Path) -> None:
    assert found(Regression, "tuned-ddp", EMAWeightAveraging) == [[], None]
    for callback in (EMAWeightAveraging, partial(StochasticWeightAveraging, 1e-2)):
        assert found(Regression, "fsdp2", callback, max_epochs=2) == [[], None]
    assert found(WithBackbone, "fsdp2", BackboneFinetuning(unfreeze_backbone_at_epoch=1)) == [[], None]
    keep = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=2)
    assert found(Regression, "fsdp2", keep, enable_checkpointing=True) == [[], None]


def test_a_callback_that_saves_on_one_rank_is_a_warning(tmp_path: Path) -> None:
    findings, error = found(Regression, "fsdp2", OnExceptionCheckpoint(tmp_path), enable_checkpointing=True)
    assert error is None
    assert "saves when an error is raised" in findings[0]["what"]


class WithBackbone(Regression):
    @property
    def backbone(self) -> nn.Module:
        return self.net[0]


@pytest.mark.parametrize("strict", [True, False])
def test_a_doctor_of_ones_own_may_only_warn(strict: bool) -> None:
    findings, error = found(partial(Regression, net_with_nan), "tuned-ddp", Doctor(strict=strict))
    assert [f["check"] for f in findings][:1] == ["NaN"]
    assert (error is not None) == strict


def unexamined() -> bool:
    trainer = Trainer(**QUIET, strategy=TunedDDPStrategy(doctor=False), devices=1, max_steps=1)  # type: ignore[arg-type]
    trainer.fit(Regression(), make_vectors(0, 1))
    return any(isinstance(callback, Doctor) for callback in trainer.callbacks)  # type: ignore[attr-defined]


def test_it_can_be_left_at_home() -> None:
    assert run_ranks(1, unexamined) == [False]


def test_meta_tensors_and_mixed_groups_are_errors() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    (finding,) = check_tensors(module)
    assert finding.level == "error"
    assert finding.what.startswith("1.weight, 1.bias: on the meta device")
    assert list(check_optimizers(module[0], [torch.optim.AdamW(module[0].parameters(), fused=True)])) == []


def test_findings_of_several_ranks_are_told_once() -> None:
    here = Finding(level="error", check="disk", what="a", why="b", fix="c")
    there = dataclasses.replace(here, what="d")
    assert merge([[here, there], [here]]) == [here, dataclasses.replace(there, ranks=(0,))]
    assert str(dataclasses.replace(here, ranks=(1, 3))) == "[disk] (rank 1, 3) a b c"
