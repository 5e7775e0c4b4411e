"""The replicated path (cases D1, D5 and D6)."""

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.llama import TinyLlama, make_tokens
from helpers.regression import Regression, make_vectors, tiny_lora_net
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler

from lightning_shard import TunedDDPStrategy
from lightning_shard.testing import RankError, assert_parity, ranks, run_ranks, run_trainer
from lightning_shard.testing.parity import QUIET

STRATEGIES = ["tuned-ddp", "fsdp2", "auto-shard"]
NUM_SAMPLES = 16


# --- D1: recomputation and LoRA ---------------------------------------------------------------------------


class Recomputed(Regression):
    """Two LoRA blocks, each recomputed in backward."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__(tiny_lora_net)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_(self.use_reentrant)
        for layer in self.net:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_d1_both_kinds_of_recomputation_train_by_default(strategy: str, use_reentrant: bool) -> None:
    make = partial(Recomputed, use_reentrant)
    (expected,) = run_ranks(1, run_trainer, partial(Regression, tiny_lora_net), make_vectors, max_steps=2)
    for result in run_ranks(2, run_trainer, make, make_vectors, strategy=strategy, max_steps=2):
        assert_parity(result, expected)


def test_d1_looking_for_unused_parameters_is_off_and_can_be_asked_for() -> None:
    strategy = partial(TunedDDPStrategy, find_unused_parameters=True)
    run_ranks(2, run_trainer, partial(Recomputed, False), make_vectors, strategy=strategy, max_steps=2)


class HalfUsed(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(1, 1)


def test_unused_parameters_are_named_by_ddp() -> None:
    with pytest.raises(RankError, match=r"2 trainable parameters took no part.*spare\.weight, spare\.bias\. Freeze"):
        run_ranks(2, run_trainer, HalfUsed, make_vectors, strategy="tuned-ddp", max_steps=2)


# --- D5: strides and buckets ----------------------------------------------------------------------------


class BucketSeen(Callback):
    num_bytes = 0
    views = False

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        wrapped = trainer.strategy.model
        assert isinstance(wrapped, DistributedDataParallel)
        self.num_bytes = wrapped.bucket_bytes_cap
        self.views = wrapped.gradient_as_bucket_view


@ranks(2)
def test_d5_buckets_are_no_larger_than_what_trains() -> None:
    seen = BucketSeen()
    result = run_trainer(TinyLlama, make_tokens, strategy="tuned-ddp", callbacks=[seen], max_steps=1)
    assert 0 < seen.num_bytes <= sum(value.nbytes for value in result.parameters.values())
    assert seen.views


@pytest.mark.parametrize("strategy", ["tuned-ddp", "auto-shard"])
@ranks(2)
def test_d5_adapters_are_reduced_in_one_piece_without_a_wrapper(strategy: str) -> None:
    result = run_trainer(partial(TinyLlama, "lora"), make_tokens, strategy=strategy, max_steps=2)
    trained_bytes = sum(value.nbytes for value in result.parameters.values())
    assert [step.calls for step in result.collectives] == [[("all_reduce", trained_bytes)]] * 2


@ranks(2)
def test_d5_views_of_buckets_can_be_switched_off() -> None:
    seen = BucketSeen()
    strategy = partial(TunedDDPStrategy, gradient_as_bucket_view=False)
    run_trainer(Regression, make_vectors, strategy=strategy, callbacks=[seen], max_steps=1)
    assert not seen.views


@ranks(2)
def test_d5_no_warning_about_strides() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_trainer(partial(Regression, tiny_lora_net), make_vectors, strategy="tuned-ddp", max_steps=3)
    assert not [str(warning.message) for warning in caught if "strides" in str(warning.message)]


# --- D6, J1: who sees which samples ---------------------------------------------------------------------------


class Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Backwards(Sampler[int]):
    """A sampler of the user's own."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.dataset) - 1, -1, -1))


class PairsOfFarAway(BatchSampler):
    """A batch sampler of the user's own, with the constructor that Lightning asks for."""

    def __iter__(self) -> Iterator[list[int]]:
        indices = list(self.sampler)
        yield from ([indices[i], indices[-1 - i]] for i in range(len(indices) // 2))


def make_loader(kind: str) -> DataLoader[Tensor]:
    dataset = Numbers()
    if kind == "shuffle":
        return DataLoader(dataset, batch_size=2, shuffle=True)
    if kind == "random-sampler":
        return DataLoader(dataset, batch_size=2, sampler=RandomSampler(dataset))
    if kind == "own-sampler":
        return DataLoader(dataset, batch_size=2, sampler=Backwards(dataset))
    if kind == "own-batch-sampler":
        return DataLoader(dataset, batch_sampler=PairsOfFarAway(SequentialSampler(dataset), 2, False))
    return DataLoader(dataset, batch_size=2)


class Notes(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1, 1) for _ in range(2))
        self.seen: list[list[int]] = []

    def training_step(self, batch: Tensor, _: int) -> Tensor:
        self.seen.append(batch.flatten().int().tolist())
        for block in self.blocks:
            batch = block(batch)
        return batch.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def batches_seen(strategy: str, kind: str) -> list[list[int]]:
    module = Notes()
    trainer = Trainer(
        **{**QUIET, "use_distributed_sampler": True}, strategy=strategy, devices=dist.get_world_size(), max_epochs=1
    )
    trainer.fit(module, make_loader(kind))
    assert trainer.strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": dist.get_rank()}  # type: ignore[attr-defined]
    return module.seen


@pytest.mark.parametrize("kind", ["plain", "shuffle", "random-sampler", "own-sampler", "own-batch-sampler"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_d6_every_sample_is_seen_once_by_one_rank(strategy: str, kind: str) -> None:
    per_rank = run_ranks(2, batches_seen, strategy, kind)
    ids = [[i for batch in batches for i in batch] for batches in per_rank]
    assert [len(set(seen)) for seen in ids] == [8, 8]
    assert set(ids[0]) | set(ids[1]) == set(range(NUM_SAMPLES))
    assert per_rank == run_ranks(2, batches_seen, "ddp", kind), "as under Lightning's own DDP"


class BareBatches(Sampler[list[int]]):
    """A batch sampler that says nothing of its batch size."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([first, first + 2] for first in range(self.rank, NUM_SAMPLES, 4))


def bare_batches(rank: int, world_size: int) -> DataLoader[Tensor]:
    return DataLoader(Numbers(), batch_sampler=BareBatches(rank))


@pytest.mark.parametrize("strategy", ["tuned-ddp", "fsdp2", "auto-shard"])
@ranks(2)
def test_d6_the_users_own_batches_are_left_alone(strategy: str) -> None:
    module = Notes()
    run_trainer(lambda: module, bare_batches, strategy=strategy, max_epochs=1)
    assert module.seen == list(BareBatches(dist.get_rank()))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_j1_two_devices_see_different_halves(strategy: str) -> None:
    first, second = run_ranks(2, batches_seen, strategy, "plain")
    assert len(first) == len(second) == 4
    assert not {i for batch in first for i in batch} & {i for batch in second for i in batch}
