"""Calling something other than the sharded module's forward (case A7)."""

from functools import partial
from typing import Any

import pytest
import torch
from helpers.llama import TinyLlama, make_tokens
from helpers.regression import WIDTH, Regression, make_vectors
from torch import Tensor

from lightning_shard.testing import run_ranks, run_trainer

STRATEGIES = ["tuned-ddp", "fsdp2", "auto-shard"]


class CallsOtherThings(TinyLlama):
    """Generates, embeds and calls single layers in places where FSDP's own hooks do not run."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Any] = []

    def look(self) -> None:
        prompt = torch.tensor([[3, 1, 4, 1, 5]])
        with torch.no_grad():
            embedded = self.model.get_input_embeddings()(prompt)
            normed = self.model.model.norm(embedded)
            logits = self.model.lm_head(normed)
        tokens = self.model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
        self.said.append((tokens.tolist(), float(embedded.double().sum()), float(logits.double().sum())))

    def on_fit_start(self) -> None:
        self.look()

    def on_train_epoch_end(self) -> None:
        self.look()

    def on_train_end(self) -> None:
        self.look()


def what_is_said(strategy: str) -> list[Any]:
    module = CallsOtherThings()
    run_trainer(lambda: module, make_tokens, strategy=strategy, max_steps=2)
    return module.said


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a7_generate_and_single_layers_work_in_every_hook(strategy: str) -> None:
    (expected,) = run_ranks(1, what_is_said, "auto")
    assert len(expected) == 3
    for said in run_ranks(2, what_is_said, strategy):
        for (tokens, embedded, logits), wanted in zip(said, expected, strict=True):
            assert tokens == wanted[0]
            assert (embedded, logits) == pytest.approx(wanted[1:], rel=1e-5)


class EncodesItself(Regression):
    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.net[:-1](x)) @ self.net[-1].weight.T

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            assert self.encode(torch.ones(1, WIDTH)).shape == (1, 1)


def test_a7_a_named_method_may_use_the_roots_own_weights() -> None:
    from lightning_shard import FSDP2Strategy

    strategy = partial(FSDP2Strategy, forward_methods=("encode",))
    run_ranks(2, run_trainer, EncodesItself, make_vectors, strategy=strategy, max_steps=1)
