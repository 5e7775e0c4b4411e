"""Parameters that are frozen, unfrozen or left unused in mid-run train as they do on one process."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.regression import Regression, block_net, make_vectors
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning
from torch import Tensor, nn

from lightning_shard import FSDP2Strategy, TunedDDPStrategy
from lightning_shard.blocks import find_blocks
from lightning_shard.parallelize.shard import unshardable
from lightning_shard.parallelize.units import find_units
from lightning_shard.testing import RankError, assert_parity, run_ranks, run_trainer
from lightning_shard.testing.parity import QUIET, trained_parameters

MOMENTUM = partial(torch.optim.SGD, momentum=0.9)


class Unfreezes(Regression):
    """The blocks are frozen in the first epoch."""

    def __init__(self) -> None:
        super().__init__(optimizer=MOMENTUM, lr=0.01)
        self.net[0].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net[0].requires_grad_(self.current_epoch > 0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), lr=self.lr)


class FreezesLater(Unfreezes):
    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(True)

    def on_train_epoch_start(self) -> None:
        self.net[0][0].requires_grad_(self.current_epoch == 0)


class FrozenEveryOtherBatch(Unfreezes):
    def on_train_epoch_start(self) -> None:
        pass

    def on_train_batch_start(self, _: Any, index: int) -> None:
        self.net[0].requires_grad_(index % 2 == 0)


class Adversaries(Regression):
    """Two halves with an optimizer each, one frozen while the other trains, as in Lightning's own example."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.judge = block_net(2)

    def training_step(self, batch: Sequence[Tensor], _: int) -> None:
        inputs, targets = batch
        first, second = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(first)
        self.manual_backward(-self.judge(inputs * self.net(inputs)).mean())
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        made = inputs * self.net(inputs).detach()
        self.manual_backward(self.judge(made).mean() - torch.tanh(self.judge(inputs * targets)).mean())
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        return [MOMENTUM(net.parameters(), lr=0.01) for net in (self.net, self.judge)]


class TwoForwards(Regression):
    def __init__(self) -> None:
        super().__init__(lr=0.01)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        inputs, targets = batch
        return super().loss(batch) + nn.functional.mse_loss(self(inputs / 2), targets)


class EveryOtherLossIsEarly(Regression):
    """Some steps use the first block only: the rest must stand still, momentum and all."""

    def __init__(self) -> None:
        super().__init__(optimizer=MOMENTUM, lr=0.01)

    def training_step(self, batch: Sequence[Tensor], index: int) -> Tensor:
        return self.net[0][0](batch[0]).pow(2).mean() if index % 2 else self.loss(batch)


class ByRank(Regression):
    """Half of every global batch uses a head of its own, so ranks use different parameters."""

    def __init__(self) -> None:
        super().__init__(optimizer=MOMENTUM, lr=0.01)
        torch.manual_seed(3)
        self.other = nn.Linear(8, 1)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        inputs, targets = batch
        hidden, num = self.net[0](inputs), len(inputs)
        firsts = 4 if num == 8 else num * (self.global_rank == 0)  # of the global batch of 8
        error = (self.net[1](hidden[:firsts]) - targets[:firsts]).pow(2).sum() if firsts else hidden.new_zeros(())
        if firsts < num:
            error = error + (self.other(hidden[firsts:]) - targets[firsts:]).pow(2).sum()
        return error / num


class Finetunes(BaseFinetuning):
    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=0.01)


class HeadFirst(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.net[0]  # a second name for the blocks, as Lightning's BackboneFinetuning wants it

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def fit(make: Any, num_ranks: int, strategy: Any, **options: Any) -> list[Any]:
    options = {"max_epochs": 3, "limit_train_batches": 3, **options}
    return run_ranks(num_ranks, run_trainer, make, make_vectors, strategy=strategy, **options)


class UnfreezesAfterValidation(Unfreezes):
    """The head, which the root's own group holds and validation leaves gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.net.requires_grad_(True)
        self.net[1].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.net[1].requires_grad_(self.current_epoch > 0)


UNUSED = partial(TunedDDPStrategy, find_unused_parameters=True)
CASES: dict[str, tuple[Any, Any]] = {
    "unfreezes-ddp": (Unfreezes, "tuned-ddp"),
    "unfreezes-fsdp2": (Unfreezes, "fsdp2"),
    "freezes-later-ddp": (FreezesLater, "tuned-ddp"),
    "every-other-batch-ddp": (FrozenEveryOtherBatch, "tuned-ddp"),
    "every-other-batch-fsdp2": (FrozenEveryOtherBatch, "fsdp2"),
    "toggled-ddp": (Adversaries, UNUSED),
    "toggled-fsdp2": (Adversaries, "fsdp2"),
    "toggled-kept": (Adversaries, partial(FSDP2Strategy, reshard_after_forward=False)),
    "two-forwards-fsdp2": (TwoForwards, "fsdp2"),
    "unused-everywhere-ddp": (EveryOtherLossIsEarly, UNUSED),
    "unused-everywhere-fsdp2": (EveryOtherLossIsEarly, "fsdp2"),
    "unused-somewhere-fsdp2": (ByRank, "fsdp2"),
}


def validated(strategy: Any) -> Any:
    module = UnfreezesAfterValidation()
    data = make_vectors(dist.get_rank(), dist.get_world_size())
    trainer = Trainer(**QUIET, strategy=strategy, devices=dist.get_world_size(), max_epochs=3, limit_train_batches=2)
    trainer.fit(module, data, data)
    return trained_parameters(module)


@pytest.mark.parametrize("strategy", ["tuned-ddp", "fsdp2"])
def test_what_is_unfrozen_after_validation_trains(strategy: str) -> None:
    (expected,) = run_ranks(1, validated, "auto")
    for result in run_ranks(2, validated, strategy):
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_what_trains_is_what_trains_on_one_process(case: str) -> None:
    make, strategy = CASES[case]
    (expected,) = fit(make, 1, "auto")
    for result in fit(make, 2, strategy):
        assert_parity(result, expected)


def finetuned(strategy: Any, callback: Any) -> Any:
    return run_trainer(
        HeadFirst, make_vectors, strategy=strategy, callbacks=[callback()], max_epochs=3, limit_train_batches=3
    )


LIGHTNINGS = partial(BackboneFinetuning, unfreeze_backbone_at_epoch=1, backbone_initial_ratio_lr=0.5)


@pytest.mark.parametrize(
    ("strategy", "callback"),
    [("tuned-ddp", Finetunes), ("fsdp2", LIGHTNINGS), (partial(FSDP2Strategy, adapters="replicated"), Finetunes)],
)
def test_a_finetuning_callback_unfreezes_what_then_trains(strategy: Any, callback: Any) -> None:
    (expected,) = run_ranks(1, finetuned, "auto", callback)
    for result in run_ranks(2, finetuned, strategy, callback):
        assert_parity(result, expected)


def test_a_block_with_two_names_is_one_block() -> None:
    module = HeadFirst()
    module.first = module.net[0][0]
    assert [name for name, _ in find_blocks(module)] == ["net.0.0", "net.0.1", "net.0.2"]
    assert not unshardable(find_units(module))


def test_unfreezing_a_resident_block_is_refused_by_name() -> None:
    with pytest.raises(RankError, match=r"the first is 'net\.0\.0\.norm\.weight'.*without resident_blocks"):
        fit(Unfreezes, 2, partial(FSDP2Strategy, resident_blocks=99))


def test_unfreezing_what_is_stored_in_a_narrow_type_is_refused() -> None:
    with pytest.raises(RankError, match="unfrozen after they had been sharded in a narrow type"):
        fit(Unfreezes, 2, "fsdp2", precision="bf16-true")
