"""Norms in FP32 where that is asked for: stored and computed so under every layout, in numbers that agree."""

from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard import AutoShardStrategy, FSDP2Strategy, Plan, TunedDDPStrategy
from lightning_shard.parallelize.norms import find_norms
from lightning_shard.testing import run_ranks, run_trainer
from tests.helpers.llama import TinyLlama, make_tokens

LAYOUTS = {
    "ddp": TunedDDPStrategy,
    "fsdp2": FSDP2Strategy,
    "half-resident": partial(FSDP2Strategy, resident_blocks=1, adapters="replicated"),
}


class Finer(TinyLlama):
    """Norms whose weights bf16 does not hold."""

    def adapted(self, model: Any) -> Any:
        for norm in find_norms(model):
            nn.init.constant_(norm.weight, 1.001)
        return super().adapted(model)


class Types(Callback):
    """Each norm's weight, and in which types it computes and answers."""

    def __init__(self) -> None:
        self.seen: set[tuple[torch.dtype, torch.dtype, torch.dtype]] = set()
        self.weights: list[Tensor] = []

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        for norm in find_norms(module):
            norm.register_forward_hook(self._note)
            self.weights.append(norm.weight)

    def _note(self, norm: nn.Module, args: Any, output: Tensor) -> None:
        self.seen.add((args[0].dtype, norm.weight.dtype, output.dtype))


def train(training: str, layout: str, precision: str, *, norms_in_fp32: bool = True) -> tuple[Any, Any]:
    types = Types()
    strategy = partial(LAYOUTS[layout], norms_in_fp32=norms_in_fp32)
    result = run_trainer(
        partial(Finer, training), make_tokens, strategy=strategy, precision=precision, callbacks=[types], max_steps=3
    )
    assert not any(isinstance(weight, DTensor) for weight in types.weights) or not norms_in_fp32
    return result, types.seen


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("training", ["lora", "full"])
def test_norms_compute_in_fp32_under_every_layout(training: str, precision: str) -> None:
    wide = {(torch.float32, torch.float32)}
    one, types = run_ranks(1, train, training, "ddp", precision)[0]
    assert {(seen[0], seen[1]) for seen in types} == wide
    for layout in LAYOUTS:
        for result, seen in run_ranks(2, train, training, layout, precision):
            assert {(each[0], each[1]) for each in seen} == wide
            if precision == "bf16-true" or layout != "ddp":
                assert {each[2] for each in seen} == {torch.bfloat16}  # what comes after goes on in the narrow type
            assert result.losses == pytest.approx(one.losses, rel=1e-2)


def test_without_the_option_the_weights_are_rounded() -> None:
    seen = [run_ranks(2, train, "lora", "fsdp2", "bf16-true", norms_in_fp32=asked)[0][1] for asked in (False, True)]
    assert [{each[1] for each in types} for types in seen] == [{torch.bfloat16}, {torch.float32}]


def split() -> None:
    strategy = partial(AutoShardStrategy, plan=Plan(tp=2), norms_in_fp32=True)
    with pytest.raises(ValueError, match="norms_in_fp32=True does not work with tp above 1"):
        run_trainer(TinyLlama, make_tokens, strategy=strategy, max_steps=1)


def test_tensor_parallelism_refuses_it() -> None:
    run_ranks(2, split)
