"""What TunedDDPStrategy adds: a size tried in the run, and gradients that travel narrow."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.llama import TinyLlama, make_tokens
from helpers.regression import Regression, make_vectors
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from lightning_shard import TunedDDPStrategy
from lightning_shard.parallelize.flat import FlatGradients
from lightning_shard.strategies import tuning
from lightning_shard.strategies.tuning import STEPS_EACH, BucketTuner
from lightning_shard.testing import assert_parity, count_collectives, ranks, run_ranks, run_trainer


class Plans(Callback):
    """The size in the plan after every step."""

    def __init__(self) -> None:
        self.sizes_mb: list[float | None] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        self.sizes_mb.append(trainer.strategy.plan.bucket_cap_mb)  # type: ignore[attr-defined]


def tuned(strategy: Any) -> tuple[list[float | None], list[int], Any]:
    seen = Plans()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "SIZES_MB", (0.01, 0.03))
        result = run_trainer(TinyLlama, make_tokens, strategy=strategy, max_steps=12, callbacks=[seen])
    # One more, of a few numbers, when the ranks compare their times.
    return seen.sizes_mb, [sum(size > 32 for _, size in step.calls) for step in result.collectives], result


def test_sizes_are_tried_in_turn_and_all_ranks_keep_one() -> None:
    (expected,) = run_ranks(1, run_trainer, TinyLlama, make_tokens, max_steps=12)
    per_rank = run_ranks(2, tuned, partial(TunedDDPStrategy, bucket_cap_mb="tune"))
    assert per_rank[0][0] == per_rank[1][0]
    sizes_mb, sent, _ = per_rank[0]
    assert sizes_mb[: STEPS_EACH - 1] == [None] * (STEPS_EACH - 1)
    assert sizes_mb[STEPS_EACH - 1 : 2 * STEPS_EACH - 1] == [0.01] * STEPS_EACH
    assert sent[STEPS_EACH] > sent[2 * STEPS_EACH] > sent[0] == 1
    assert sizes_mb[-1] is not None
    for _, _, result in per_rank:
        assert_parity(result, expected)


@ranks(2)
def test_the_choice_is_by_the_slowest_rank_and_needs_a_clear_gain() -> None:
    clock = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning.time, "perf_counter", lambda: clock[0])
        choose(clock)


def choose(clock: list[float]) -> None:
    # Rank 1 is slow with the second size, both are a little faster with the third and clearly with none.
    seconds = [[1.0, 0.5, 0.99], [1.0, 2.0, 0.99]][dist.get_rank()]
    tuner = BucketTuner(8.0, 16 * 2**20, torch.device("cpu"))
    tuner.sizes_mb, tuner._times = [8.0, 1.0, 16.0], [[], [], []]
    chosen: list[float] = []
    while not tuner.done:
        clock[0] += seconds[tuner._index]
        size = tuner.after_step()
        if size is not None:
            chosen.append(size)
    assert chosen == [1.0, 16.0, 8.0]


def test_gradients_that_fit_one_piece_leave_nothing_to_tune() -> None:
    assert BucketTuner(0.25, 2**18, torch.device("cpu")).done
    assert BucketTuner(25.0, 100 * 2**20, torch.device("cpu")).sizes_mb == [25.0, 1.0, 4.0, 16.0, 64.0, 100.0]


# --- narrow gradients ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("compress", "rtol"), [("fp16", 2e-3), ("bf16", 2e-2)])
@pytest.mark.parametrize("training", ["full", "lora"])
def test_narrow_gradients_train_to_their_rounding(training: Any, compress: Any, rtol: float) -> None:
    """Plain SGD moves by lr x gradient, whose rounding is half a unit of the last place: 2**-11 and 2**-8."""
    make = partial(Regression, nn_of[training])
    (expected,) = run_ranks(1, run_trainer, make, make_vectors, max_steps=4)
    strategy = partial(TunedDDPStrategy, compress=compress)
    results = run_ranks(2, run_trainer, make, make_vectors, strategy=strategy, max_steps=4)
    trained_bytes = sum(value.nbytes for value in expected.parameters.values())
    for result in results:
        assert_parity(result, expected, rtol=rtol)
        assert [step.calls for step in result.collectives] == [[("all_reduce", trained_bytes // 2)]] * 4
    for name, value in results[0].parameters.items():
        assert torch.equal(value, results[1].parameters[name])


def two_layers() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def half_frozen() -> nn.Module:
    net = two_layers()
    net[0].requires_grad_(False)  # type: ignore[index]
    return net


nn_of = {"full": two_layers, "lora": half_frozen}


def test_powersgd_sends_factors_through_ddp() -> None:
    strategy = partial(TunedDDPStrategy, compress="powersgd")
    first, second = run_ranks(2, run_trainer, Regression, make_vectors, strategy=strategy, max_steps=3)
    assert first.losses[-1] < first.losses[0]
    for name, value in first.parameters.items():
        assert torch.equal(value, second.parameters[name])


@ranks(2)
def test_a_gradient_that_rounds_to_zero_is_still_one() -> None:
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    flat = FlatGradients(parameters)
    flat.wire_dtype = torch.float16
    flat.before_backward()
    used = parameters[: 1 + dist.get_rank()]  # rank 0 leaves out the second
    with count_collectives() as sent:
        sum((-1e-30 * p).sum() for p in used).backward()  # type: ignore[union-attr]
    assert sent.calls == [("all_reduce", 8)]
    for parameter in parameters:
        assert parameter.grad is not None
        assert parameter.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bucket_cap_mb": "tuned"}, "must be a number of MiB, 'tune' or None"),
        ({"bucket_cap_mb": "tune", "static_graph": True}, "torch's DDP cannot"),
        ({"compress": "int8"}, "must be 'none', 'fp16', 'bf16' or 'powersgd'"),
        ({"compress": "fp16", "ddp_comm_hook": print}, "leave ddp_comm_hook out"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TunedDDPStrategy(**options)
