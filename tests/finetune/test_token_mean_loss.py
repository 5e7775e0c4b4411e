"""The gradient is that of the mean over label tokens, whatever the ranks, micro-batches and accumulation (C4)."""

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_shard.finetune import TokenMeanLoss
from lightning_shard.testing import run_ranks

TEN = [10.0]
NINE_ONES = [1.0] * 9


class Scale(TokenMeanLoss):
    """One weight; the loss of a token x is w * x, so its gradient is x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(1, 2, bias=False)  # two equal rows, one for each of two shards
        nn.init.zeros_(self.w.weight)
        self.gradients: list[float] = []
        self.losses: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.train_on(self.w(batch[:, None]).sum() / 2, batch.numel())

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.validate_on(batch.sum(), batch.numel())

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        super().on_before_optimizer_step(optimizer)
        gradient = whole(self.w.weight.grad)
        assert gradient[0] == gradient[1]
        self.gradients.append(2 * gradient[0].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(
    batches_of_rank: list[list[list[float]]], accumulate: int, strategy: str, **options: object
) -> list[float]:
    """The gradients of every optimizer step of an epoch, seen by this rank."""
    ranks = len(batches_of_rank)
    module = Scale()
    trainer = make_trainer(ranks, strategy, accumulate_grad_batches=accumulate, max_epochs=1, **options)
    rank = trainer.global_rank
    trainer.fit(module, loader(batches_of_rank[rank]))
    return module.gradients


def make_trainer(ranks: int, strategy: str, **options: object) -> Trainer:
    silent = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return Trainer(
        accelerator="cpu", devices=ranks, strategy=strategy, use_distributed_sampler=False, **{**silent, **options}
    )


def loader(batches: list[list[float]]) -> DataLoader[Tensor]:
    return DataLoader([torch.tensor(batch) for batch in batches], batch_size=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["ddp", "tuned-ddp", "fsdp2"])
@pytest.mark.parametrize(
    ("batches_of_rank", "accumulate", "expected"),
    [
        ([[TEN], [NINE_ONES]], 1, [1.9]),
        ([[TEN, NINE_ONES], [NINE_ONES, TEN]], 2, [38 / 20]),
        ([[TEN, NINE_ONES, [2.0]], [NINE_ONES, TEN, [3.0, 3.0]]], 2, [38 / 20, 8 / 3]),  # a shorter last window
        ([[TEN], [[]]], 1, [10.0]),  # a rank with nothing to learn
        ([[TEN, TEN], [TEN, TEN]], 2, [10.0]),  # over-corrected by ranks or micro-batches it would be 5, 20 or 40
    ],
    ids=["one-batch", "accumulated", "last-window", "empty-rank", "equal-lengths"],
)
def test_gradient_is_the_mean_over_all_tokens_of_two_ranks(
    batches_of_rank: list[list[list[float]]], accumulate: int, expected: list[float], strategy: str
) -> None:
    seen = run_ranks(2, gradients, batches_of_rank, accumulate, strategy)
    assert seen == [pytest.approx(expected, rel=1e-6)] * 2


def test_one_rank_divides_once() -> None:
    assert gradients([[TEN, NINE_ONES]], 1, "auto") == pytest.approx([10.0, 1.0])
    assert gradients([[TEN, NINE_ONES]], 2, "auto") == pytest.approx([1.9])
    assert gradients([[TEN, NINE_ONES]], 2, "auto", precision="64-true") == pytest.approx([1.9])


def clipped_weight(strategy: str) -> tuple[float, float]:
    """Weight after one SGD step of 1 with a gradient of 1.9 clipped to 0.5, and the logged loss."""
    module = Scale()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=1.0)  # type: ignore[method-assign]
    trainer = make_trainer(2, strategy, gradient_clip_val=0.5, max_epochs=1)
    trainer.fit(module, loader([[TEN, NINE_ONES][trainer.global_rank]]))
    return whole(module.w.weight)[0].item(), trainer.callback_metrics["train_loss"].item()


@pytest.mark.parametrize("strategy", ["ddp", "tuned-ddp", "fsdp2"])
def test_clipping_sees_the_mean_gradient(strategy: str) -> None:
    for weight, loss in run_ranks(2, clipped_weight, strategy):
        assert weight == pytest.approx(-0.5 / 2**0.5, rel=1e-4)  # both rows have half of 1.9
        assert loss == 0.0


def validation_loss() -> float:
    module = Scale()
    trainer = make_trainer(2, "ddp")
    trainer.validate(module, loader([[TEN, NINE_ONES][trainer.global_rank]]), verbose=False)
    return trainer.callback_metrics["val_loss"].item()


def test_validation_loss_counts_tokens_over_ranks() -> None:
    assert run_ranks(2, validation_loss) == [pytest.approx(1.9)] * 2
