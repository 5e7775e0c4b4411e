"""The losses after a resume are those of the run that was never interrupted."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.resuming import losses_of
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_shard import FSDP2Strategy, TunedDDPStrategy
from lightning_shard.testing import run_ranks

LAYOUTS: dict[str, tuple[int, Any]] = {
    "one": (1, TunedDDPStrategy),
    "ddp-2": (2, TunedDDPStrategy),
    "fsdp2-2": (2, FSDP2Strategy),
}


@pytest.mark.parametrize(
    ("layout", "epoch"),
    [
        ("fsdp2-2", 8),  # in the middle of an epoch
        ("one", 5),  # at its end
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("one", 8), ("ddp-2", 8), ("ddp-2", 5), ("fsdp2-2", 5))
        ),
    ],
)
def test_bit_equal_in_the_same_layout_with_dropout_and_shuffling(layout: str, epoch: int, tmp_path: Path) -> None:
    num_ranks, strategy = LAYOUTS[layout]
    run = partial(run_ranks, num_ranks, losses_of, strategy, "full", tmp_path, dropout=0.3, shuffle=True, epoch=epoch)
    whole, rates = run(steps=10)[0]
    rest, rates_after = run(steps=10, ckpt=tmp_path / "step=5.ckpt", seed=99)[0]
    assert rest == whole[5:]
    assert rates_after == rates


def scaled(make_strategy: Any, folder: Path, **options: Any) -> dict[str, Any]:
    """Losses at ``16-mixed``, and the gradient scaler's scale and place in its interval at the end."""
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3))
    scales: list[tuple[float, int]] = []

    class Scales(Callback):
        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            scaler: Any = trainer.precision_plugin
            scales.append((scaler.scaler.get_scale(), scaler.scaler._get_growth_tracker()))

    losses, _ = losses_of(
        make_strategy, "full", folder, precision=None, plugins=[plugin], more_callbacks=[Scales()], **options
    )
    return {"losses": losses, "scales": scales}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fsdp2-2", "ddp-2"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("fsdp2-2", "fsdp2-2"), ("ddp-2", "fsdp2-2"))),
    ],
)
def test_the_gradient_scaler_goes_on_where_it_was(before: str, after: str, tmp_path: Path) -> None:
    whole = run_ranks(2, scaled, LAYOUTS[before][1], tmp_path, steps=10)[0]
    rest = run_ranks(2, scaled, LAYOUTS[after][1], tmp_path, steps=10, ckpt=tmp_path / "step=5.ckpt")[0]
    assert whole["scales"][4] == (2048.0, 2)  # in the middle of an interval, and grown once
    assert rest["scales"] == whole["scales"][5:]
    if before == after:
        assert rest["losses"] == whole["losses"][5:]
    else:  # half precision rounds where the layout casts
        torch.testing.assert_close(
            torch.tensor(rest["losses"]), torch.tensor(whole["losses"][5:]), rtol=1e-2, atol=1e-3
        )
