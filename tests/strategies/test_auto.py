"""What the auto strategy decides, on what grounds, and that all ranks hear the same."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist
from helpers.llama import TinyLlama, make_tokens
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.fsdp import FSDPModule

from lightning_shard import AutoShardStrategy, Decision, Plan
from lightning_shard.testing import RankError, ranks, run_ranks, run_trainer

PLENTY = 2**34


class Watch(Callback):
    """The strategy as it was during the run."""

    decision: Decision | None = None
    plan: Plan
    sharded_parts = 0

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, AutoShardStrategy)
        assert isinstance(strategy, DDPStrategy)
        self.plan, self.decision = strategy.plan, strategy.decision
        assert strategy.estimate is (self.decision.estimate if self.decision else None)
        self.sharded_parts = sum(isinstance(part, FSDPModule) for part in module.modules())


def decide(make: Callable[[], LightningModule] = TinyLlama, **options: Any) -> tuple[Plan, Decision | None, int]:
    """Plan, decision and the number of sharded parts of a run on this rank."""
    watch = Watch()
    run_trainer(make, make_tokens, strategy=partial(AutoShardStrategy, **options), callbacks=[watch], max_steps=1)
    return watch.plan, watch.decision, watch.sharded_parts


AS_IT_IS = {"activation_checkpoint": "none"}
"""Recomputing replicas are leaner too, and on a host often faster than shards."""


def replicated_and_sharded_bytes() -> tuple[int, int]:
    """What the tiny Llama needs per device under the leanest plan with replicas alone, and the leanest with shards."""
    _, decision, _ = run_ranks(2, decide, device_memory=PLENTY, pin=AS_IT_IS)[0]
    assert decision is not None
    needs = [(decision.plan, decision.estimate.device_bytes)]
    needs += [(rejected.plan, rejected.device_bytes) for rejected in decision.rejected]
    replicated = min(num_bytes for plan, num_bytes in needs if plan.strategy == "ddp")
    sharded = min(num_bytes for plan, num_bytes in needs if plan.dp_shard == 2)
    return replicated, sharded


def test_replicas_where_they_fit() -> None:
    for plan, decision, sharded_parts in run_ranks(2, decide, device_memory=PLENTY):
        assert plan.strategy == "ddp"
        assert plan.dp_replicate == 2
        assert sharded_parts == 0
        assert decision is not None
        assert decision.fits
        assert decision.reason
        assert decision.rejected


def test_shards_where_replicas_do_not_fit() -> None:
    replicated, sharded = replicated_and_sharded_bytes()
    assert sharded < replicated
    between = (replicated + sharded) // 2
    for plan, decision, sharded_parts in run_ranks(2, decide, device_memory=between, headroom=0.05, pin=AS_IT_IS):
        assert plan.strategy == "fsdp2"
        assert sharded_parts > 0
        assert decision is not None
        reasons = [rejected.reason for rejected in decision.rejected if rejected.plan.strategy == "ddp"]
        assert reasons


def test_no_fit_is_said_on_every_rank_with_the_shortfall() -> None:
    messages = run_ranks(2, refused, device_memory=1000)
    assert messages[0] == messages[1]
    assert "No plan fits" in messages[0]
    assert "It lacks" in messages[0]
    assert "What would help" in messages[0]


def refused(**options: Any) -> str:
    with pytest.raises(RuntimeError) as caught:
        decide(**options)
    return str(caught.value)


def smallest(**options: Any) -> tuple[Plan, Decision | None, int]:
    memory = PLENTY if dist.get_rank() == 0 else PLENTY // 4
    return decide(device_memory=memory, **options)


def test_the_smallest_device_counts_and_all_ranks_agree() -> None:
    first, second = run_ranks(2, smallest)
    assert first[0] == second[0]
    for _, decision, _ in (first, second):
        assert decision is not None
        assert decision.capacity_bytes == PLENTY // 4


def test_a_pin_is_kept_and_a_given_plan_is_run() -> None:
    for plan, decision, sharded_parts in run_ranks(2, decide, device_memory=PLENTY, pin={"dp_shard": 2}):
        assert plan.dp_shard == 2
        assert decision is not None
        assert sharded_parts > 0
    wanted = Plan(dp_shard=2, reshard_after_forward=False)
    for plan, decision, sharded_parts in run_ranks(2, decide, plan=wanted):
        assert plan == wanted
        assert decision is None
        assert sharded_parts > 0


@pytest.mark.parametrize("training", ["full", "lora"])
def test_the_real_run_is_what_is_planned_for(training: str) -> None:
    for _, decision, _ in run_ranks(2, decide, partial(TinyLlama, training), device_memory=PLENTY):
        assert decision is not None
        weights = sum(p.nbytes for p in TinyLlama(training).parameters())  # type: ignore[arg-type]
        assert sum(decision.estimate.terms.values()) >= weights


@ranks(2)
def test_the_plan_is_not_known_before_setup() -> None:
    with pytest.raises(RuntimeError, match="The plan is known once the Trainer has set up the run"):
        _ = AutoShardStrategy().plan


def test_a_pin_that_cannot_be_carried_out_is_refused_on_all_ranks() -> None:
    with pytest.raises(RankError, match="dp_shard"):
        run_ranks(2, decide, device_memory=PLENTY, pin={"dp_shard": 3}, timeout_s=60)
