"""Replicas whose gradients lie in flat buffers, under a Trainer: the numbers of one process, and what they send."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from helpers.llama import EPS, TinyLlama, make_llama, make_tokens
from helpers.regression import WIDTH, Regression, block_net, make_vectors, tiny_lora_net
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from lightning_shard import AutoShardStrategy, Plan, TunedDDPStrategy, lora
from lightning_shard.testing import RankError, RunResult, assert_parity, ranks, run_ranks, run_trainer

REPLICAS = partial(AutoShardStrategy, plan=Plan(dp_replicate=2))
STEPS = 4


class Adapted(TinyLlama):
    """A tiny Llama with an adapter of any method."""

    def __init__(self, method: str) -> None:
        self.method = method
        super().__init__("full")

    def _build(self) -> None:
        self.model = make_llama() if self.method == "full" else lora(make_llama(), r=4, seed=7, method=self.method)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate_grad_batches": 2},
    "clip": {"gradient_clip_val": 0.1},
    "accumulate-and-clip": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
}


@cache
def one_process(method: str, options: str) -> RunResult:
    make = partial(Adapted, method)
    (result,) = run_ranks(1, run_trainer, make, make_tokens, max_steps=STEPS, **OPTIONS[options])
    return result


EVERY_RUN = ("plain", "accumulate-and-clip")


@pytest.mark.parametrize(
    "options", [pytest.param(o, marks=() if o in EVERY_RUN else pytest.mark.slow) for o in OPTIONS]
)
@pytest.mark.parametrize("method", ["full", "lora", "dora"])
def test_flat_replicas_train_like_one_process(method: str, options: str) -> None:
    make = partial(Adapted, method)
    results = run_ranks(2, run_trainer, make, make_tokens, strategy=REPLICAS, max_steps=STEPS, **OPTIONS[options])
    for result in results:
        assert_parity(result, one_process(method, options))
    accumulate = OPTIONS[options].get("accumulate_grad_batches", 1)
    trained_bytes = sum(value.nbytes for value in results[0].parameters.values())
    sent = [step.calls for step in results[0].collectives]
    assert sent == ([[]] * (accumulate - 1) + [[("all_reduce", trained_bytes)]]) * STEPS


@ranks(2)
def test_larger_gradients_travel_in_pieces_while_backward_runs() -> None:
    plan = Plan(dp_replicate=2, bucket_cap_mb=0.02)
    result = run_trainer(
        partial(Adapted, "full"), make_tokens, strategy=partial(AutoShardStrategy, plan=plan), max_steps=2
    )
    trained_bytes = sum(value.nbytes for value in result.parameters.values())
    pieces = [size for _, size in result.collectives[1].calls]
    assert sum(pieces) == trained_bytes
    assert 2 < len(pieces) <= -(-trained_bytes // (0.02 * 2**20))


class SeenByHooks(TinyLlama):
    """Notes a gradient in every hook that sees gradients."""

    def __init__(self) -> None:
        super().__init__("lora")
        self.seen: list[list[float]] = []

    def _note(self) -> None:
        gradient = next(p.grad for p in self.parameters() if p.grad is not None and p.grad.any())
        self.seen.append(gradient.flatten()[:3].tolist())

    def on_after_backward(self) -> None:
        self._note()

    def on_before_optimizer_step(self, _: Any) -> None:
        self._note()


def gradients_seen() -> list[list[float]]:
    module = SeenByHooks()
    run_trainer(lambda: module, make_tokens, strategy=REPLICAS, max_steps=2)
    return module.seen


def test_every_hook_sees_finished_gradients() -> None:
    first, second = run_ranks(2, gradients_seen)
    assert first == second
    assert first[0] == first[1] != first[2]


class TwoForwards(Regression):
    """Two forwards, one backward."""

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        inputs, targets = batch
        return nn.functional.mse_loss(self(inputs) + self(-inputs), targets)


class OddSteps(Regression):
    """A head that only some steps use, and one that none uses."""

    def __init__(self) -> None:
        super().__init__(optimizer=partial(torch.optim.AdamW, eps=EPS))
        self.sometimes = nn.Linear(WIDTH, 1)
        self.never = nn.Linear(1, 1)

    def training_step(self, batch: Sequence[Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        return loss + self.sometimes(batch[0]).mean() if index % 2 else loss


class ByHand(Regression):
    """Manual optimization of two networks in turn, as adversaries are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = block_net(1)

    def training_step(self, batch: Sequence[Tensor], _: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        for optimizer, sign in ((first, 1.0), (second, -1.0)):
            self.toggle_optimizer(optimizer)
            loss = sign * (self.net(batch[0]) - self.critic(batch[0])).square().mean() + self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.01) for net in (self.net, self.critic)]


class Reentrant(Regression):
    """Each block recomputed by a backward inside the backward."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        for layer in self.net:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


class Thawing(Callback):
    """Unfreezes what was frozen, in the middle of a run."""

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, index: int) -> None:
        first = module.get_submodule("net.0")
        if index == 0:
            first.requires_grad_(False)
        if index == 2:
            first.requires_grad_(True)


CALLS: dict[str, Any] = {
    "several-forwards": TwoForwards,
    "unused": OddSteps,
    "manual": ByHand,
    "reentrant": Reentrant,
    "lora-by-hand": partial(Regression, tiny_lora_net),
}


@pytest.mark.parametrize("name", CALLS)
def test_flat_replicas_follow_any_course_of_training(name: str) -> None:
    (expected,) = run_ranks(1, run_trainer, CALLS[name], make_vectors, max_epochs=1)
    for result in run_ranks(2, run_trainer, CALLS[name], make_vectors, strategy=REPLICAS, max_epochs=1):
        assert_parity(result, expected)


class AllParameters(Regression):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_what_is_frozen_or_unfrozen_in_the_middle_is_reduced_while_it_trains() -> None:
    (expected,) = run_ranks(1, run_trainer, AllParameters, make_vectors, callbacks=[Thawing()], max_epochs=1)
    for result in run_ranks(
        2, run_trainer, AllParameters, make_vectors, strategy=REPLICAS, callbacks=[Thawing()], max_epochs=1
    ):
        assert_parity(result, expected)


class SharedByCheckpoints(Regression):
    """One layer used in two reentrant checkpoints."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        return checkpoint(self.net, checkpoint(self.net, x, use_reentrant=True), use_reentrant=True).sum(
            1, keepdim=True
        )


def test_a_gradient_that_comes_twice_after_it_was_sent_is_refused() -> None:
    with pytest.raises(RankError, match=r"a second gradient in one backward.*use_reentrant=False"):
        run_ranks(2, run_trainer, SharedByCheckpoints, make_vectors, strategy=REPLICAS, max_steps=1)


# --- who carries a replicated plan out ---------------------------------------------------------------------


class BatchStatistics(Regression):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))


def wrapped(make: Any, strategy: Any) -> bool:
    seen: list[bool] = []

    class Look(Callback):
        def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
            seen.append(isinstance(trainer.strategy.model, DistributedDataParallel))
            assert trainer.strategy.plan.flat_gradients is not seen[0]  # type: ignore[attr-defined]

    data = make_tokens if make in (TinyLlama, lora_llama) else make_vectors
    run_trainer(make, data, strategy=strategy, callbacks=[Look()], max_steps=1)
    return seen[0]


def lora_llama() -> TinyLlama:
    return TinyLlama("lora")


@pytest.mark.parametrize(
    ("make", "strategy", "by_ddp"),
    [
        (TinyLlama, "auto-shard", False),
        (lora_llama, "tuned-ddp", False),
        (TinyLlama, "tuned-ddp", True),
        (lora_llama, partial(TunedDDPStrategy, bucket_cap_mb=1.0), True),
        (lora_llama, partial(TunedDDPStrategy, static_graph=True), True),
        (lora_llama, partial(TunedDDPStrategy, find_unused_parameters=True), True),
        (lora_llama, partial(AutoShardStrategy, find_unused_parameters=True), True),
        (BatchStatistics, "auto-shard", True),
    ],
)
def test_options_of_torch_ddp_and_saved_buffers_keep_it(make: Any, strategy: Any, by_ddp: bool) -> None:
    assert run_ranks(2, wrapped, make, strategy) == [by_ddp] * 2
