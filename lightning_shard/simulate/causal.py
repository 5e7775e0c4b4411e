"""The plain step of a causal language model: tokens in, mean loss out."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.specs import TrainSpec


class CausalStep(nn.Module):
    """A transformers model with its own loss, labels being the input."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The loss of token ids (rows, tokens)."""
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        return loss


def token_batch(train: TrainSpec) -> Tensor:
    """Token ids (micro-batch, sequence) of the longest sequence."""
    return torch.zeros(train.micro_batch_size, train.seq_len, dtype=torch.long)
