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
