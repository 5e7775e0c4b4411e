"""The plain step of a causal language model: tokens in, mean loss out."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from lightning_shard.activations.loss import CHUNK_TOKENS
from lightning_shard.parallelize.vocabulary import SplitHead, split_head
from lightning_shard.specs import TrainSpec


class CausalStep(nn.Module):
    """A transformers model with its own loss, labels being the input.

    Args:
        model: the causal language model, in peft's wrapper or not.
        loss: a value of :attr:`TrainSpec.loss`; ``full`` is the model's own.
    """

    def __init__(self, model: Any, loss: str = "full") -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self._kept: Tensor | None = None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The loss of token ids (rows, tokens)."""
        if self._loss == "chunked":
            return self._chunked_loss(batch)
        if self._loss != "full":
            return self._loss_of(batch)
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    def _loss_of(self, tokens: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens, use_cache=False).logits
        wide = logits if self._loss == "narrow" else logits.float()
        scored, targets = wide, functional.pad(tokens[:, 1:], (0, 1), value=-100)
        if self._loss == "shifted":
            scored, targets = wide[:, :-1].contiguous(), tokens[:, 1:]
        if self._loss == "kept":
            self._kept = wide
        return functional.cross_entropy(scored.flatten(0, 1), targets.flatten())

    def _chunked_loss(self, tokens: Tensor) -> Tensor:
        model = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        hidden = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
        head = model.get_output_embeddings()
        # Through one call of the head, so that a head in a group of its own is gathered and reduced once.
        split = split_head(head)
        head.forward = lambda states, labels: _loss_by_chunks(states, labels, head, split)
        try:
            with split.apart() if split else nullcontext():
                loss: Tensor = head(hidden[:, :-1], tokens[:, 1:])
        finally:
            del head.forward
        return loss


def token_batch(train: TrainSpec) -> Tensor:
    """Token ids (micro-batch, sequence) of the longest sequence."""
    return torch.zeros(train.micro_batch_size, train.seq_len, dtype=torch.long)


def _loss_by_chunks(hidden: Tensor, labels: Tensor, head: Any, split: SplitHead | None) -> Tensor:
    states, targets = hidden.flatten(0, 1), labels.flatten()
    weight, bias = head.weight, head.bias  # as they are now: backward recomputes with the same casts

    def loss_of(some: Tensor, wanted: Tensor) -> Tensor:
        logits = functional.linear(some, weight, bias)
        if split is not None:
            return split.loss(logits.float(), wanted)
        return functional.cross_entropy(logits.float(), wanted, reduction="sum")

    pieces = zip(torch.split(states, CHUNK_TOKENS), torch.split(targets, CHUNK_TOKENS), strict=True)
    losses = [checkpoint(loss_of, *piece, use_reentrant=False) for piece in pieces]
    total: Tensor = torch.stack(losses).sum()
    return total / targets.numel()
