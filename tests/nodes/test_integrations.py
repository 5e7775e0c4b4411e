"""The same samples per step with any number of ranks, and a signal that saves on all ranks together."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.regression import WIDTH, Regression
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_shard.integrations import KeepGlobalBatch, SaveOnPreemption
from lightning_shard.testing import run_ranks
from lightning_shard.testing.parity import QUIET

OPTIONS: dict[str, Any] = {name: value for name, value in QUIET.items() if name != "use_distributed_sampler"}


def samples(count: int = 48, **options: Any) -> DataLoader[Any]:
    numbers = torch.arange(float(count)).unsqueeze(1)
    inputs = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(inputs, numbers * 0 + inputs.sum(1, keepdim=True), numbers), **options)


class Numbered(Regression):
    """A regression that remembers which samples each step saw."""

    def __init__(self) -> None:
        super().__init__(lr=0.01)
        self.seen: dict[int, list[int]] = {}

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        mine: list[list[int]] = [[] for _ in range(self.trainer.world_size)]
        numbers = [int(n) for n in batch[2].flatten()]
        if dist.is_initialized():
            dist.all_gather_object(mine, numbers)
        else:
            mine = [numbers]
        self.seen.setdefault(self.trainer.global_step, []).extend(n for part in mine for n in part)
        return super().training_step(batch[:2], index)


class StopAt(Callback):
    """Save and break off after a step, in the middle of an epoch."""

    def __init__(self, step: int | None, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.step is not None and trainer.global_step >= self.step:
            trainer.save_checkpoint(self.path)
            trainer.should_stop = True
            trainer.limit_train_batches = 0
            raise KeyboardInterrupt


def train(folder: Path, *, strategy: str, stop: int | None, resume: bool, workers: int = 0) -> dict[int, list[int]]:
    """Samples of each step of two epochs, or until the run stops."""
    module = Numbered()
    path = folder / "mid.ckpt"
    trainer = Trainer(
        **OPTIONS, strategy=strategy, devices=dist.get_world_size(), max_epochs=2,
        callbacks=[KeepGlobalBatch(8), StopAt(stop, path)],
    )  # fmt: skip
    try:
        trainer.fit(
            module, samples(batch_size=2, shuffle=True, num_workers=workers), ckpt_path=path if resume else None
        )
    except (KeyboardInterrupt, SystemExit):
        assert stop is not None
    return {step: sorted(numbers) for step, numbers in module.seen.items()}


@pytest.mark.parametrize(
    ("before", "after"), [((2, "fsdp2"), (1, "auto-shard")), ((1, "auto-shard"), (2, "tuned-ddp"))]
)
@pytest.mark.parametrize("stop", [3, 6, 8])
def test_a_run_goes_on_with_the_samples_it_had_not_seen(
    before: tuple[int, str], after: tuple[int, str], stop: int, tmp_path: Path
) -> None:
    whole, *_ = run_ranks(1, train, tmp_path, strategy="auto-shard", stop=None, resume=False)
    assert len(whole) == 12
    assert sorted(n for step in range(6) for n in whole[step]) == list(range(48))
    first, *_ = run_ranks(before[0], train, tmp_path, strategy=before[1], stop=stop, resume=False)
    second, *_ = run_ranks(after[0], train, tmp_path, strategy=after[1], stop=None, resume=True)
    assert set(first) == set(range(stop))
    assert first | second == whole


@pytest.mark.slow
def test_workers_that_read_ahead_go_on_right_too(tmp_path: Path) -> None:
    whole, *_ = run_ranks(1, train, tmp_path, strategy="auto-shard", stop=None, resume=False, workers=1)
    first, *_ = run_ranks(2, train, tmp_path, strategy="fsdp2", stop=8, resume=False, workers=1)
    second, *_ = run_ranks(1, train, tmp_path, strategy="auto-shard", stop=None, resume=True, workers=1)
    assert first | second == whole


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("size", "loader", "options", "said"),
    [
        (6, samples(batch_size=4), {}, "global_batch_size=6 is not a multiple of batch_size=4 x 1 ranks"),
        (8, samples(batch_size=4), {"accumulate_grad_batches": 2}, "both say how many micro-batches"),
        (8, DataLoader(Endless(), batch_size=4), {}, "order of its own"),
        (8, samples(batch_size=None), {}, "needs a DataLoader with a batch_size"),
    ],
)
def test_what_it_cannot_keep_is_refused(size: int, loader: Any, options: dict[str, Any], said: str) -> None:
    trainer = Trainer(
        **OPTIONS, **options, devices=1, strategy="auto-shard", max_steps=1, callbacks=[KeepGlobalBatch(size)]
    )
    with pytest.raises(ValueError, match=said):
        trainer.fit(Regression(), loader)


def be_preempted(folder: Path) -> tuple[int, int, bool, int]:
    """Exit status, step, whether the handler of before is back, and steps that a later callback saw, on a rank of two;
    only rank 1 gets the signal.
    """

    class Signal(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 2 and trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGUSR1)

    class Later(Callback):
        seen = 0

        def on_train_batch_end(self, *_: Any) -> None:
            self.seen += 1

    later = Later()

    before = signal.getsignal(signal.SIGUSR1)
    trainer = Trainer(
        **OPTIONS, strategy="fsdp2", devices=2, max_epochs=1, callbacks=[Signal(), SaveOnPreemption(folder), later]
    )  # fmt: skip
    with pytest.raises(SystemExit) as left:
        trainer.fit(Numbered(), samples(batch_size=2))
    return int(str(left.value)), trainer.global_step, signal.getsignal(signal.SIGUSR1) == before, later.seen


def test_a_signal_to_one_rank_saves_on_all(tmp_path: Path) -> None:
    assert run_ranks(2, be_preempted, tmp_path) == [(128 + signal.SIGUSR1, 3, True, 3)] * 2
    assert (tmp_path / "last-preempted.ckpt").exists()
