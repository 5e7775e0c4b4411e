"""Lightning's own features do under every layout what they do on one process, or are refused at the start."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.regression import Regression, block_net, make_vectors
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelSummary,
    StochasticWeightAveraging,
)
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler
from torch import Tensor

from lightning_shard import FSDP2Strategy, grad_norm
from lightning_shard.testing import RunResult, assert_parity, run_ranks, run_trainer
from lightning_shard.testing.parity import QUIET

LAYOUTS: dict[str, tuple[int, Any]] = {
    "ddp": (2, "tuned-ddp"),
    "fsdp2": (2, "fsdp2"),
    "replicated-trainables": (2, partial(FSDP2Strategy, adapters="replicated")),
    "hsdp": (4, partial(FSDP2Strategy, dp_shard=2)),
}
EVERY_LAYOUT = pytest.mark.parametrize(
    "layout", ["fsdp2", *(pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS if name != "fsdp2")]
)


class Frozen(Regression):
    """The first block is frozen, so that plans may keep it whole."""

    def __init__(self) -> None:
        super().__init__(block_net)
        self.net[0][0].requires_grad_(False)


def fit(make_callback: Callable[[], Callback], strategy: Any = "auto", **options: Any) -> tuple[RunResult, Any]:
    """What was learned, and what the callback kept in ``seen``."""
    callback = make_callback()
    options = {"max_epochs": 4, "limit_train_batches": 4, **options}
    result = run_trainer(Frozen, make_vectors, strategy=strategy, callbacks=[callback], **options)
    return result, getattr(callback, "seen", None)


@cache
def on_one_process(make_callback: Callable[[], Callback]) -> tuple[RunResult, Any]:
    ((result, seen),) = run_ranks(1, fit, make_callback)
    return result, seen


def assert_same(make_callback: Callable[[], Callback], layout: str) -> None:
    num_ranks, strategy = LAYOUTS[layout]
    expected, wanted = on_one_process(make_callback)
    for result, seen in run_ranks(num_ranks, fit, make_callback, strategy):
        assert_parity(result, expected)
        assert seen == (wanted if wanted is None else pytest.approx(wanted, rel=1e-4))


class GradNorms(Callback):
    def __init__(self, norm_type: float | str) -> None:
        self.norm_type = norm_type
        self.seen: dict[str, float] = {}

    def on_before_optimizer_step(self, trainer: Trainer, module: LightningModule, optimizer: Any) -> None:
        norms = grad_norm(module, self.norm_type)
        if trainer.global_step == 0 and dist.get_world_size() == 1:
            from lightning.pytorch.utilities import grad_norm as lightnings

            assert {k: float(v) for k, v in norms.items()} == pytest.approx(
                {k: float(v) for k, v in lightnings(module, self.norm_type).items()}
            )
        self.seen |= {f"{trainer.global_step}/{name}": float(norm) for name, norm in norms.items()}


@EVERY_LAYOUT
@pytest.mark.parametrize("norm_type", [2, "inf"])
def test_gradient_norms(layout: str, norm_type: Any) -> None:
    assert_same(partial(GradNorms, norm_type), layout)


@EVERY_LAYOUT
def test_accumulation_on_a_schedule(layout: str) -> None:
    assert_same(partial(GradientAccumulationScheduler, {0: 1, 1: 2, 3: 4}), layout)


@EVERY_LAYOUT
def test_stochastic_weight_averaging(layout: str) -> None:
    assert_same(partial(StochasticWeightAveraging, swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1), layout)


@EVERY_LAYOUT
def test_exponential_moving_averages(layout: str) -> None:
    assert_same(partial(EMAWeightAveraging, decay=0.5), layout)


class FindRate(LearningRateFinder):
    @property
    def seen(self) -> float:
        assert self.optimal_lr is not None
        return float(self.optimal_lr.suggestion() or 0.0)


@EVERY_LAYOUT
def test_j7_the_learning_rate_finder(layout: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_same(partial(FindRate, num_training_steps=8, early_stop_threshold=None), layout)


class Counted(ModelSummary):
    """What the table of a run's layers would show."""

    def __init__(self) -> None:
        super().__init__(max_depth=2)
        self.seen: list[Any] = []

    def summarize(
        self, summary_data: Any, total_parameters: int, trainable_parameters: int, *_: Any, **__: Any
    ) -> None:  # type: ignore[override]
        self.seen += [total_parameters, trainable_parameters, *dict(summary_data)["Params"]]


def counted(strategy: Any) -> list[Any]:
    _, seen = fit(Counted, strategy, enable_model_summary=True, max_epochs=1)
    return list(seen)


@EVERY_LAYOUT
def test_the_summary_counts_whole_parameters(layout: str) -> None:
    num_ranks, strategy = LAYOUTS[layout]
    (expected,) = run_ranks(1, counted, "auto")
    seen, *_ = run_ranks(num_ranks, counted, strategy)
    assert len(expected) > 4
    assert seen == expected


class Logs(Regression):
    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("mean", loss, sync_dist=True)
        self.log("most", loss, sync_dist=True, reduce_fx="max", on_step=False, on_epoch=True)
        return loss


def logged(strategy: Any) -> dict[str, float]:
    trainer = Trainer(**QUIET, strategy=strategy, devices=dist.get_world_size(), max_epochs=1, profiler="simple")
    trainer.fit(Logs(), make_vectors(dist.get_rank(), dist.get_world_size()))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_logs_are_reduced_over_the_ranks(layout: str) -> None:
    num_ranks, strategy = LAYOUTS[layout]
    (expected,) = run_ranks(1, logged, "auto")
    first, *others = run_ranks(num_ranks, logged, strategy)
    assert first["mean"] == pytest.approx(expected["mean"], rel=1e-5)
    assert all(other == first for other in others)


def peaks(strategy: Any, precision: str) -> Any:
    from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype

    trainer = Trainer(**QUIET, strategy=strategy, devices=1, precision=precision)
    return _plugin_to_compute_dtype(trainer.precision_plugin)


@pytest.mark.parametrize("strategy", ["tuned-ddp", "fsdp2", "auto-shard"])
def test_throughput_is_measured_against_the_peak_of_the_compute_type(strategy: str) -> None:
    wanted = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "bf16-true": torch.bfloat16}
    assert {precision: peaks(strategy, precision) for precision in wanted} == wanted


def profiled(folder: str, kind: str) -> str:
    """What one of Lightning's profilers writes about a rank's fit on shards."""
    options: dict[str, Any] = {"export_to_chrome": False} if kind == "pytorch" else {}
    make = {"advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}[kind]
    profiler = make(dirpath=folder, filename=kind, **options)
    trainer = Trainer(**QUIET, strategy="fsdp2", devices=2, max_epochs=1, profiler=profiler)
    trainer.fit(Logs(), make_vectors(dist.get_rank(), dist.get_world_size()))
    (file,) = Path(folder).glob(f"fit-{kind}*{dist.get_rank()}*")
    return file.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["advanced", "pytorch"])
def test_profilers_see_a_step_on_shards(kind: str, tmp_path: Path) -> None:
    for told in run_ranks(2, profiled, str(tmp_path), kind):
        assert "training_step" in told
