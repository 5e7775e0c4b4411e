"""Manual optimization (case C6), norms and clipping (B3, B6, B7), adapters that some steps leave out (D2)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.regression import Regression, make_vectors
from lightning.pytorch import Trainer
from torch import Tensor, nn

from lightning_shard import AutoShardStrategy, FSDP2Strategy, Plan
from lightning_shard.parallelize.clipping import total_norm
from lightning_shard.testing import RankError, assert_parity, run_ranks, run_trainer
from lightning_shard.testing.parity import QUIET

HSDP = partial(FSDP2Strategy, dp_shard=2)


# --- B3, B6, B7: norms and clipping ---------------------------------------------------------------------------


class Norms(Regression):
    seen: tuple[float, float] = (0.0, 0.0)

    def on_before_optimizer_step(self, _: Any) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]
        self.seen = (float(total_norm(grads)), float(torch.cat([g.flatten() for g in whole]).norm()))


def norms(strategy: Any) -> tuple[float, float]:
    module = Norms()
    run_trainer(lambda: module, make_vectors, strategy=strategy, max_steps=1)
    return module.seen


def test_b3_the_norm_is_that_of_whole_gradients_on_every_rank() -> None:
    ((expected, _),) = run_ranks(1, norms, "auto")
    for norm, of_whole in run_ranks(2, norms, "fsdp2"):
        assert norm == pytest.approx(of_whole, rel=1e-5)
        assert norm == pytest.approx(expected, rel=1e-5)


FUSED = partial(torch.optim.AdamW, eps=1e-4, fused=True)


@pytest.mark.parametrize("strategy", ["tuned-ddp", "fsdp2"])
def test_b6_a_fused_optimizer_is_clipped_under_mixed_precision(strategy: str) -> None:
    make = partial(Regression, optimizer=FUSED, lr=0.01)
    options = {"precision": "bf16-mixed", "max_steps": 3, "strategy": strategy}
    clipped = run_ranks(2, run_trainer, make, make_vectors, gradient_clip_val=0.01, **options)[0]
    free = run_ranks(2, run_trainer, make, make_vectors, **options)[0]
    with pytest.raises(AssertionError):
        assert_parity(clipped, free, rtol=1e-3)


def test_b7_offload_asks_for_a_backend_that_serves_the_host() -> None:
    fixed, pinned = FSDP2Strategy(Plan(dp_shard=2, offload="all")), AutoShardStrategy(pin={"offload": "all"})
    for strategy in (fixed, pinned, FSDP2Strategy(offload="all")):
        strategy.parallel_devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
        strategy._local_rank = 0
        assert strategy._get_process_group_backend() == "cpu:gloo,cuda:nccl"


# --- C6: manual optimization ----------------------------------------------------------------------------------


class ByHand(Regression):
    automatic_optimization = False

    def __init__(self, how: str) -> None:
        super().__init__(lr=0.01)
        self.how = how

    def training_step(self, batch: Sequence[Tensor], _: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        optimizer.zero_grad()
        if self.how == "manual_backward":
            self.manual_backward(loss)
        else:
            loss.backward()
        optimizer.step()


@pytest.mark.parametrize("strategy", ["tuned-ddp", "fsdp2", "auto-shard", HSDP])
def test_c6_manual_backward_averages_gradients(strategy: Any) -> None:
    (expected,) = run_ranks(1, run_trainer, partial(ByHand, "manual_backward"), make_vectors, max_epochs=1)
    num_ranks = 4 if strategy is HSDP else 2
    results = run_ranks(
        num_ranks, run_trainer, partial(ByHand, "manual_backward"), make_vectors, strategy=strategy, max_epochs=1
    )
    for result in results:
        assert_parity(result, expected)


@pytest.mark.parametrize("strategy", ["tuned-ddp", "fsdp2"])
def test_c6_a_bare_backward_averages_them_or_is_refused(strategy: str) -> None:
    told, results = "", []
    try:
        results = run_ranks(2, run_trainer, partial(ByHand, "bare"), make_vectors, strategy=strategy, max_epochs=1)
    except RankError as error:
        told = str(error)
    assert results or "Call self.manual_backward(loss)" in told
    for result in results:
        for name, value in results[0].parameters.items():
            assert torch.equal(value, result.parameters[name])


# --- D2: an adapter that some steps leave out -------------------------------------------------------------------


class TwoAdapters(Regression):
    """The second adapter is used in odd steps only."""

    def __init__(self) -> None:
        super().__init__(lr=0.01)
        torch.manual_seed(3)
        self.net.requires_grad_(False)
        self.adapters = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
        self.step = 0

    def training_step(self, batch: Sequence[Tensor], index: int) -> Tensor:
        inputs, targets = batch
        output = self.adapters[0](self.net(inputs))
        if index % 2:
            output = output + self.adapters[1](output)
        return nn.functional.mse_loss(output, targets)


@pytest.mark.parametrize("strategy", ["tuned-ddp", "fsdp2", "auto-shard"])
def test_d2_an_adapter_unused_in_some_steps_trains_in_the_others(strategy: str) -> None:
    (expected,) = run_ranks(1, run_trainer, TwoAdapters, make_vectors, max_epochs=1)
    for result in run_ranks(2, run_trainer, TwoAdapters, make_vectors, strategy=strategy, max_epochs=1):
        assert_parity(result, expected)


def samples() -> int:
    trainer = Trainer(**QUIET, strategy="fsdp2", devices=dist.get_world_size(), max_steps=1)
    trainer.fit(Regression(), make_vectors(dist.get_rank(), dist.get_world_size()))
    return trainer.strategy.distributed_sampler_kwargs["num_replicas"]  # type: ignore[attr-defined,no-any-return]


def test_j1_every_rank_of_a_sharded_plan_samples_its_own_data() -> None:
    assert run_ranks(2, samples) == [2, 2]
