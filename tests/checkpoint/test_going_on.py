"""The losses after a resume are those of the run that was never interrupted."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.resuming import losses_of

from lightning_shard import FSDP2Strategy, TunedDDPStrategy
from lightning_shard.testing import run_ranks

LAYOUTS: dict[str, tuple[int, Any]] = {
    "one": (1, TunedDDPStrategy),
    "ddp-2": (2, TunedDDPStrategy),
    "fsdp2-2": (2, FSDP2Strategy),
}


@pytest.mark.parametrize("epoch", [8, 5], ids=["mid-epoch", "epoch-end"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bit_equal_in_the_same_layout_with_dropout_and_shuffling(layout: str, epoch: int, tmp_path: Path) -> None:
    num_ranks, strategy = LAYOUTS[layout]
    run = partial(run_ranks, num_ranks, losses_of, strategy, "full", tmp_path, dropout=0.3, shuffle=True, epoch=epoch)
    whole, rates = run(steps=10)[0]
    rest, rates_after = run(steps=10, ckpt=tmp_path / "step=5.ckpt", seed=99)[0]
    assert rest == whole[5:]
    assert rates_after == rates
