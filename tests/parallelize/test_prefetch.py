"""Gathers and reductions that run beside compute on the host: the same numbers, the same traffic, in the asked order."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from helpers.llama import NUM_BLOCKS, TinyLlama, Training, make_tokens
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_shard import FSDP2Strategy
from lightning_shard.testing import RunResult, assert_parity, ranks, run_ranks, run_trainer

OPTIONS: dict[str, Any] = {"max_steps": 3, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}


@cache
def one_process(training: Training) -> RunResult:
    (result,) = run_ranks(1, run_trainer, partial(TinyLlama, training), make_tokens, **OPTIONS)
    return result


@pytest.mark.parametrize("prefetch", [0, 2, 9])
@pytest.mark.parametrize("training", ["full", "lora"])
def test_any_depth_keeps_the_numbers(training: Training, prefetch: int) -> None:
    strategy = partial(FSDP2Strategy, prefetch=prefetch)
    for result in run_ranks(2, run_trainer, partial(TinyLlama, training), make_tokens, strategy=strategy, **OPTIONS):
        assert_parity(result, one_process(training))


@ranks(2)
def test_what_fsdp_divides_itself_is_in_before_it_does() -> None:
    """Sums in FP64 are divided after they were reduced: a result on its way would be divided too early."""
    results = [
        run_trainer(
            TinyLlama, make_tokens, strategy=partial(FSDP2Strategy, prefetch=depth), precision="64-true", max_steps=3
        )
        for depth in (0, 1)
    ]
    assert_parity(results[1], results[0], rtol=1e-12)


class GatheredAhead(Callback):
    """The most blocks that were gathered, or being gathered, for after the one at work, forward and backward."""

    most = 0
    most_backward = 0

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.blocks = list(module.get_submodule("model.model.layers"))
        for index, block in enumerate(self.blocks):
            block.register_forward_hook(partial(self.count, index))

    def count(self, index: int, _: Any, __: Any, output: Any) -> None:
        self.most = max(self.most, self.gathered(self.blocks[index + 1 :]))
        output.register_hook(partial(self.count_backward, index))

    def count_backward(self, index: int, _: Any) -> None:
        self.most_backward = max(self.most_backward, self.gathered(self.blocks[:index]))

    def gathered(self, blocks: list[Any]) -> int:
        groups = [block._get_fsdp_state()._fsdp_param_groups[0] for block in blocks]
        return sum(group._all_gather_result is not None or group.is_unsharded for group in groups)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@ranks(2)
def test_as_many_blocks_are_ahead_as_the_plan_says(prefetch: int) -> None:
    seen = GatheredAhead()
    strategy = partial(FSDP2Strategy, prefetch=prefetch)
    run_trainer(TinyLlama, make_tokens, strategy=strategy, callbacks=[seen], max_steps=1)
    assert (seen.most, seen.most_backward) == (prefetch, prefetch)


@ranks(2)
def test_depth_does_not_change_the_traffic() -> None:
    sent = [
        run_trainer(TinyLlama, make_tokens, strategy=partial(FSDP2Strategy, prefetch=depth), max_steps=2).collectives
        for depth in (0, 1, NUM_BLOCKS)
    ]
    for step in zip(*sent, strict=True):
        assert len({(frozenset(each.counts.items()), frozenset(each.num_bytes.items())) for each in step}) == 1


class NotesGradients(TinyLlama):
    """Notes this rank's gradients as the first hook after backward sees them."""

    def on_after_backward(self) -> None:
        self.noted = {n: p.grad.full_tensor().clone() for n, p in self.named_parameters()}  # type: ignore[union-attr]


@ranks(2)
def test_gradients_are_in_when_backward_returns() -> None:
    noted = []
    for depth in (0, 1):
        module = NotesGradients()
        run_trainer(lambda m=module: m, make_tokens, strategy=partial(FSDP2Strategy, prefetch=depth), max_steps=1)
        noted.append(module.noted)
    for name, gradient in noted[0].items():
        assert torch.equal(gradient, noted[1][name]), name
