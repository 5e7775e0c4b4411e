"""Out of memory in the first steps: every rank takes the next plan and nothing is lost, or the error says what helps."""

import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.llama import TinyLlama, make_tokens
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_shard import AutoShardStrategy
from lightning_shard.checkpoint.manifest import is_checkpoint
from lightning_shard.strategies import auto_oom
from lightning_shard.testing import RankError, run_ranks, run_trainer
from lightning_shard.testing.parity import QUIET, trained_parameters

IN_UPDATE = ("state", "update")
MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB."


class RunsOut(TinyLlama):
    """Raises torch's error on some ranks, in one micro-batch, before or after its forward, or in backward."""

    def __init__(self, training: Any, rank: int | None, micro_batch: int, where: str, times: int = 1) -> None:
        super().__init__(training)
        self.plan_of_failure = (rank, micro_batch, where)
        self.failures = [times]  # a list: put back by nobody
        self.seen = 0

    def training_step(self, batch: Any, index: int) -> Any:
        rank, micro_batch, where = self.plan_of_failure
        fails = index == micro_batch and rank in (None, dist.get_rank() if dist.is_initialized() else 0)
        fails = fails and self.failures[0] > 0 and where not in IN_UPDATE
        self.failures[0] -= fails
        self.seen += 1
        if fails and where == "before":
            raise torch.OutOfMemoryError(MESSAGE)
        loss = super().training_step(batch, index)
        if fails and where == "after":
            raise torch.OutOfMemoryError(MESSAGE)
        if fails:
            loss.register_hook(run_out)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        plain = super().configure_optimizers()
        if self.plan_of_failure[2] not in IN_UPDATE:
            return plain
        return Starved(self, plain.param_groups)

    def on_train_batch_end(self, *_: Any) -> None:
        self.watched = [self.trainer.strategy._watch is not None]  # for signals and failures of other ranks


class Starved(torch.optim.AdamW):
    """Runs out in one update: while it makes its state, or with half of the weights changed."""

    def __init__(self, module: RunsOut, groups: Any) -> None:
        super().__init__(groups)
        self.module = module

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()  # a scaler has called it
        rank, step, where = self.module.plan_of_failure
        fails = self.module.trainer.global_step == step and rank in (
            None,
            dist.get_rank() if dist.is_initialized() else 0,
        )
        if fails and self.module.failures[0] > 0:
            self.module.failures[0] -= 1
            parameters = self.param_groups[0]["params"]
            for parameter in parameters[: len(parameters) // 2]:
                self.state[parameter]["exp_avg"] = torch.ones_like(parameter)
                if where == "update":
                    with torch.no_grad():
                        parameter.add_(1.0)
            raise torch.OutOfMemoryError(MESSAGE)
        super().step()
        return loss


class SaveEachStep(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def run_out(_: Any) -> None:
    raise torch.OutOfMemoryError(MESSAGE)


def fit(
    training: str, rank: int | None, micro_batch: int, where: str, accumulate: int = 1, on_oom: Any = "replan",
    times: int = 1, folder: Path | None = None, average: bool = False, half: bool = False, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    strategy = AutoShardStrategy(on_oom=on_oom, **options)
    world_size = dist.get_world_size()
    trainer = Trainer(
        **QUIET, strategy=strategy, devices=world_size, max_steps=4, accumulate_grad_batches=accumulate,
        callbacks=[*([SaveEachStep(folder)] if folder else []), *([EMAWeightAveraging(decay=0.5)] if average else [])],
        plugins=[MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", growth_interval=3))] if half else None,
    )  # fmt: skip
    module = RunsOut(training, rank, micro_batch, where, times)
    trainer.fit(module, make_tokens(dist.get_rank(), world_size))
    assert strategy.decision is not None
    return {
        "parameters": trained_parameters(module),
        "plan": strategy.plan,
        "reason": strategy.decision.reason,
        "estimate": strategy.estimate,
        "steps": trainer.global_step,
        "seen": module.seen,
        "watched": module.watched[0],
        "scaler": trainer.precision_plugin.scaler.state_dict() if half else None,  # type: ignore[attr-defined]
    }


@cache
def expected(training: str, accumulate: int = 1) -> Any:
    (result,) = run_ranks(
        1, run_trainer, partial(TinyLlama, training), make_tokens, max_steps=4, accumulate_grad_batches=accumulate
    )
    return result


SLOW = pytest.mark.slow
CASES = [
    pytest.param("lora", "before", marks=SLOW),
    pytest.param("lora", "after", marks=SLOW),
    ("lora", "backward"),
    pytest.param("full", "before", marks=SLOW),
    pytest.param("full", "after", marks=SLOW),
    pytest.param("full", "backward", marks=SLOW),
]


@pytest.mark.parametrize(("training", "where"), CASES)
def test_all_ranks_take_the_next_plan_and_nothing_is_lost(training: str, where: str) -> None:
    results = run_ranks(2, fit, training, 1, 1, where)
    for result in results:
        assert result["steps"] == 4
        assert result["plan"] == results[0]["plan"]
        assert "memory ran out" in result["reason"]
        assert result["watched"]
        assert_same(result["parameters"], expected(training).parameters)


@pytest.mark.parametrize("micro_batch", [pytest.param(0, marks=SLOW), 1])
def test_micro_batches_before_it_are_done_again(micro_batch: int) -> None:
    wanted = expected("lora", accumulate=2).parameters
    for result in run_ranks(2, fit, "lora", 0, micro_batch, "backward", accumulate=2):
        assert result["seen"] == 8  # what was counted in the step that failed is put back
        assert_same(result["parameters"], wanted)


SHARDED = [
    ("lora", 1, "backward", 1),
    pytest.param("full", None, "after", 1, marks=SLOW),
    pytest.param("full", 0, "before", 1, marks=SLOW),
    pytest.param("full", 1, "backward", 2, marks=SLOW),
]


@pytest.mark.parametrize(("training", "rank", "where", "accumulate"), SHARDED)
def test_a_sharded_module_takes_the_next_plan_too(training: str, rank: int | None, where: str, accumulate: int) -> None:
    first = run_ranks(2, fit, training, 5, 99, where, accumulate=accumulate, pin={"dp_shard": 2})[0]
    results = run_ranks(2, fit, training, rank, 1, where, accumulate=accumulate, pin={"dp_shard": 2})
    for result in results:
        assert result["plan"] == results[0]["plan"]
        assert result["plan"].strategy == first["plan"].strategy == "fsdp2"
        assert result["estimate"].device_bytes < first["estimate"].device_bytes
        assert result["seen"] == 4 * accumulate
        assert_same(result["parameters"], expected(training, accumulate).parameters)


FIRST_UPDATES = [
    ("lora", "state", 1, {}),  # the other rank has updated by then
    ("full", "update", 0, {"dp_shard": 2}),
    pytest.param("full", "state", 0, {}, marks=SLOW),
    pytest.param("full", "update", None, {}, marks=SLOW),
    pytest.param("lora", "update", 1, {"dp_shard": 2}, marks=SLOW),
    pytest.param("full", "update", 0, {"dp_shard": 1, "offload": "optimizer"}, marks=SLOW),
]


@pytest.mark.parametrize(("training", "where", "rank", "pin"), FIRST_UPDATES)
def test_the_first_update_is_taken_back_on_all_ranks(
    training: str, where: str, rank: int | None, pin: dict[str, Any]
) -> None:
    for result in run_ranks(2, fit, training, rank, 0, where, pin=pin):
        assert "memory ran out" in result["reason"]
        assert result["steps"] == 4
        assert_same(result["parameters"], expected(training).parameters)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["update", "backward"])
@pytest.mark.parametrize("pin", [{"dp_shard": 1}, {"dp_shard": 2}], ids=["whole", "sharded"])
def test_the_gradient_scaler_goes_on_as_if_nothing_had_happened(where: str, pin: dict[str, Any]) -> None:
    wanted = run_ranks(2, fit, "full", 5, 0, where, half=True, pin=pin)
    for result, undisturbed in zip(run_ranks(2, fit, "full", 1, 0, where, half=True, pin=pin), wanted, strict=True):
        assert "memory ran out" in result["reason"]
        assert result["scaler"] == undisturbed["scaler"]
        for name, value in undisturbed["parameters"].items():
            torch.testing.assert_close(result["parameters"][name], value, rtol=1e-2, atol=1e-4, msg=name)


AVERAGED = [
    ({"activation_checkpoint": "none", "offload": "none"}, 1, None),  # from replicas to shards
    pytest.param({"dp_shard": 2}, 1, "file", marks=SLOW),
    pytest.param({"dp_shard": 2}, 1, "directory", marks=SLOW),
]


@pytest.mark.parametrize(("pin", "times", "form"), AVERAGED)
def test_an_average_of_weights_follows_the_layout(
    pin: dict[str, Any], times: int, form: str | None, tmp_path: Path
) -> None:
    (wanted,) = run_ranks(1, fit, "full", 5, 0, "after", average=True)
    options = {} if form is None else {"folder": tmp_path, "checkpoint_format": form}
    results = run_ranks(2, fit, "full", None, 2, "after", average=True, times=times, pin=pin, **options)
    for result in results:
        assert "memory ran out" in result["reason"]
        assert result["plan"].strategy == "fsdp2"
        assert_same(result["parameters"], wanted["parameters"])


def test_a_later_update_cannot_be_taken_back_and_says_why() -> None:
    with pytest.raises(RankError, match="cannot be done again: only what the first update of a fit changes is kept"):
        run_ranks(2, fit, "lora", 1, 2, "update")


def fit_without_room() -> None:
    auto_oom.host_available = lambda default: 1000
    fit("full", 0, 0, "update")


@pytest.mark.slow
def test_without_room_for_a_copy_it_says_so() -> None:
    with pytest.raises(RankError, match="the host has .* free for a copy of .* per process"):
        run_ranks(1, fit_without_room)


@pytest.mark.slow
def test_a_sharded_module_that_has_no_leaner_plan_ends_with_the_error_and_no_rank_waits_long() -> None:
    with pytest.raises(RankError, match="no plan needs less(.|\n)*What would help, cheapest first"):
        run_ranks(2, fit, "full", 1, 1, "after", pin={"dp_shard": 2}, times=99)


def test_a_layout_that_stays_says_why() -> None:
    with pytest.raises(RankError, match="cannot be changed in the run .*: its shards wait in host memory"):
        run_ranks(2, fit, "full", None, 0, "before", pin={"dp_shard": 2, "offload": "all"}, times=99)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pin", [{"dp_shard": 1}, {"activation_checkpoint": "none"}], ids=["whole", "sharded-on-the-way"]
)
def test_it_climbs_more_than_once(pin: dict[str, Any]) -> None:
    once, twice = (run_ranks(2, fit, "full", None, 0, "after", times=n, pin=pin)[0] for n in (1, 2))
    assert twice["estimate"].device_bytes < once["estimate"].device_bytes
    assert_same(twice["parameters"], expected("full").parameters)


def test_checkpoints_are_saved_before_and_after(tmp_path: Path) -> None:
    for result in run_ranks(2, fit, "lora", 1, 2, "backward", folder=tmp_path):
        assert "memory ran out under the plan before" in result["reason"]
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == [f"{step}.ckpt" for step in range(1, 5)]
    assert all(is_checkpoint(path) for path in tmp_path.glob("*.ckpt"))


def test_one_process_climbs_too() -> None:
    (result,) = run_ranks(1, fit, "full", 0, 2, "after")
    assert result["plan"].activation_checkpoint != "none"
    assert_same(result["parameters"], expected("full").parameters)


def assert_same(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, value in wanted.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("on_oom", ["error", "replan"])
def test_the_error_has_the_memory_table_and_three_ways_out(on_oom: str) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(1, fit, "full", 0, 0, "before", on_oom=on_oom, times=99)
    text = str(caught.value.error)
    assert isinstance(caught.value.error, torch.OutOfMemoryError)
    assert "The plan was estimated to need, at its peak" in text
    assert re.search(r"trained weights +\S+ \S+\n", text)
    assert re.search(r"What would help, cheapest first:\n  1\. .+\n  2\. .+\n  3\. .+", text)
    assert ("no plan needs less" in text) == (on_oom == "replan")


def test_after_the_first_steps_it_is_an_error() -> None:
    with pytest.raises(RankError, match="What would help, cheapest first"):
        run_ranks(1, fit_late)


def fit_late() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auto_oom, "GUARDED_STEPS", 1)
        fit("full", 0, 2, "before")


def test_an_error_that_is_none_of_memory_passes() -> None:
    with pytest.raises(RankError, match="of the user"):
        run_ranks(1, fit_broken)


def fit_broken() -> None:
    trainer = Trainer(**QUIET, strategy=AutoShardStrategy(on_oom="replan"), devices=1, max_steps=2)  # type: ignore[arg-type]
    trainer.fit(Broken("lora"), make_tokens(0, 1))


class Broken(TinyLlama):
    def training_step(self, batch: Any, index: int) -> Any:
        raise KeyError("of the user")


def test_a_wrong_wish_is_refused() -> None:
    with pytest.raises(ValueError, match='on_oom=\'retry\' must be "error" or "replan"'):
        AutoShardStrategy(on_oom="retry")  # type: ignore[arg-type]
