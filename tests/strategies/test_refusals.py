"""Bad input: an error on every rank that says what was given, the rule, and what to do."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.llama import TinyLlama, make_llama, make_tokens
from helpers.regression import Regression, make_vectors
from lightning.pytorch import LightningModule
from torch import nn

from lightning_shard import AutoShardStrategy, FSDP2Strategy, Plan, lora
from lightning_shard.testing import run_ranks, run_trainer

STRATEGIES = ["tuned-ddp", "fsdp2", "auto-shard"]


def message(make: Callable[[], LightningModule], data: Any, folder: Path, **options: Any) -> str:
    """What a run that must not start says on this rank."""
    with pytest.raises((ValueError, RuntimeError)) as caught:
        run_trainer(make, data, max_steps=1, default_root_dir=folder, **options)
    return str(caught.value)


def messages(folder: Path, make: Any = Regression, data: Any = make_vectors, **options: Any) -> set[str]:
    said = set(run_ranks(2, message, make, data, folder, timeout_s=60, **options))
    assert list(folder.iterdir()) == [], "nothing is left half-written"
    return said


@pytest.mark.parametrize("make", [FSDP2Strategy, AutoShardStrategy])
def test_a_plan_for_another_world_size(make: Any, tmp_path: Path) -> None:
    (said,) = messages(tmp_path, strategy=partial(make, plan=Plan(dp_shard=4)))
    assert said.startswith("The plan needs 4 ranks (dp_replicate=1 x dp_shard=4 x tp=1) but 2 were launched.")
    assert "Re-plan for 2 devices, or launch 4" in said


def test_shards_that_do_not_divide_the_ranks(tmp_path: Path) -> None:
    (said,) = messages(tmp_path, strategy=partial(FSDP2Strategy, dp_shard=3))
    assert "dp_shard=3" in said
    assert "does not divide the 2 ranks" in said


class Frozen(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return self.optimizer([nn.Parameter(self.net[1].weight.detach())], lr=0.1)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_that_trains(strategy: str, tmp_path: Path) -> None:
    (said,) = messages(tmp_path, make=Frozen, strategy=strategy)
    assert "trainable" in said or "Nothing in" in said


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_precision_without_fp32_masters(strategy: str, tmp_path: Path) -> None:
    (said,) = messages(tmp_path, strategy=strategy, precision="16-true")
    assert said.startswith("precision='16-true' is not supported. Use one of 32-true")


OPTIONS: dict[str, tuple[Any, str]] = {
    "ddp-only": (partial(FSDP2Strategy, find_unused_parameters=True), "has no use for find_unused_parameters"),
    "ddp-buckets": (partial(FSDP2Strategy, bucket_cap_mb=3), "has no use for bucket_cap_mb.*use TunedDDPStrategy"),
    "plan-and-field": (partial(FSDP2Strategy, Plan(dp_shard=2), prefetch=2), "Both a plan and prefetch were given"),
    "no-plan": (partial(FSDP2Strategy, {"dp_shard": 2}), "must be a lightning_shard.Plan"),
    "one-string": (partial(FSDP2Strategy, forward_methods="encode"), "must be a tuple of method names"),
    "reshard": (partial(FSDP2Strategy, reshard_after_forward="yes"), "reshard_after_forward='yes' must be a whole"),
    "prefetch": (partial(FSDP2Strategy, prefetch=-1), "prefetch=-1 must be a whole number, 0 or more"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_that_mean_nothing_are_refused_at_once(case: str) -> None:
    make, wanted = OPTIONS[case]
    with pytest.raises((TypeError, ValueError), match=wanted):
        make()


def test_a_forward_method_that_is_not_there(tmp_path: Path) -> None:
    (said,) = messages(tmp_path, strategy=partial(FSDP2Strategy, forward_methods=("encode",)))
    assert said.startswith("forward_methods names encode, which Regression does not have")


class Penalty(Regression):
    def loss(self, batch: Any) -> Any:
        return super().loss(batch) + self.net[0][0].up.weight.pow(2).sum()


def test_a_weight_used_outside_its_forward(tmp_path: Path) -> None:
    (said,) = messages(tmp_path, make=Penalty, strategy="fsdp2")
    assert "used where it is not gathered" in said
    assert "forward_methods" in said


class Penalised(Regression):
    def loss(self, batch: Any) -> Any:
        inputs = batch[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(self(inputs).sum(), inputs, create_graph=True)
        return super().loss(batch) + slope.pow(2).sum()


def test_second_derivatives(tmp_path: Path) -> None:
    (said,) = messages(tmp_path, make=Penalised, strategy="fsdp2")
    assert "create_graph=True" in said
    run_ranks(2, run_trainer, Penalised, make_vectors, strategy="tuned-ddp", max_steps=1)


class LogsNorms(Regression):
    def on_before_optimizer_step(self, _: Any) -> None:
        from lightning.pytorch.utilities import grad_norm

        self.norms = grad_norm(self, 2)


def test_lightnings_own_gradient_norm(tmp_path: Path) -> None:
    (said,) = messages(tmp_path, make=LogsNorms, strategy="fsdp2")
    assert "Use lightning_shard.grad_norm" in said


class NoSuchLayer(TinyLlama):
    def _build(self) -> None:
        self.model = lora(make_llama(), r=4, target_modules=["q_prj", "v_proj"])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_adapter_that_matches_no_layer(strategy: str, tmp_path: Path) -> None:
    (said,) = messages(tmp_path, make=partial(NoSuchLayer, late=True), data=make_tokens, strategy=strategy)
    assert "target_modules 'q_prj' match no layer of LlamaForCausalLM" in said
    for name in ("down_proj", "k_proj", "q_proj", "v_proj"):
        assert name in said


@pytest.mark.parametrize("headroom", [-0.1, 1.0])
def test_a_headroom_out_of_range(headroom: float) -> None:
    with pytest.raises(ValueError, match=f"headroom={headroom}"):
        AutoShardStrategy(headroom=headroom)


def test_different_modules_on_different_ranks(tmp_path: Path) -> None:
    (said,) = messages(tmp_path, make=DependsOnRank, strategy="fsdp2")
    assert "Rank 1 built a different module from rank 0" in said


class DependsOnRank(Regression):
    def __init__(self) -> None:
        import torch.distributed as dist

        super().__init__()
        self.extra = nn.Linear(1, 1 + dist.get_rank())
