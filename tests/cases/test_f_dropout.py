"""Dropout differs between ranks, weights do not, and recomputation repeats the mask (case F7)."""

from functools import partial
from typing import Any

import pytest
import torch
from helpers.regression import Regression, make_vectors
from lightning.pytorch import seed_everything
from torch import Tensor, nn

from lightning_shard import FSDP2Strategy, TunedDDPStrategy, lora
from lightning_shard.testing import run_ranks, run_trainer

STRATEGIES: dict[str, Any] = {"ddp": TunedDDPStrategy, "fsdp2": FSDP2Strategy}


class DropsOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.drop(torch.tanh(self.up(x)))
        return result


class WithDropout(Regression):
    """Drops half of each block's output, or half of what its adapter sees."""

    def __init__(self, *, adapted: bool) -> None:
        super().__init__(lr=0.01)
        self.net: Any = nn.Sequential(nn.Sequential(*(DropsOut() for _ in range(3))), nn.Linear(8, 1))
        dropout: nn.Module = self.net[0][0].drop
        if adapted:
            for block in self.net[0]:
                block.drop = nn.Identity()
            self.net = lora(self.net, r=4, lora_dropout=0.5, target_modules=["up"])
            dropout = self.net.base_model.model[0][0].up.lora_dropout["default"]
        self.masks: list[Tensor] = []
        self.start = {name: p.detach().clone() for name, p in self.named_parameters()}
        dropout.register_forward_hook(lambda _, __, out: self.masks.append(out.detach() != 0))


def drop(strategy: str, recompute: str, *, adapted: bool) -> tuple[Tensor, tuple[float, ...], dict[str, Tensor]]:
    seed_everything(1, verbose=False)  # the same on both ranks
    module = WithDropout(adapted=adapted)
    make = partial(STRATEGIES[strategy], activation_checkpoint=recompute)
    # Both ranks see the same data.
    result = run_trainer(lambda: module, lambda *_: make_vectors(0, 1), strategy=make, max_steps=3)
    return module.masks[0], result.losses, module.start


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("strategy", "adapted"),
    [("ddp", False), ("fsdp2", True), pytest.param("ddp", True, marks=SLOW), pytest.param("fsdp2", False, marks=SLOW)],
)
def test_f7_masks_differ_between_ranks_weights_do_not_and_recomputation_repeats_them(
    strategy: str, adapted: bool
) -> None:
    plain = run_ranks(2, drop, strategy, "none", adapted=adapted)
    assert not torch.equal(plain[0][0], plain[1][0])
    torch.testing.assert_close(plain[0][2], plain[1][2], rtol=0, atol=0)
    again = run_ranks(2, drop, strategy, "full", adapted=adapted)
    assert again[0][1] == pytest.approx(plain[0][1], rel=1e-6)
