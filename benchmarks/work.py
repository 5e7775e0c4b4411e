"""What is trained: small Llamas on random tokens, the same for every engine."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_shard import lora

SEED = 1
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64},
    "mini": {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 1024},
    "nano": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512},
    "s": {"hidden_size": 192, "intermediate_size": 592, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 8192},
    "m": {"hidden_size": 512, "intermediate_size": 1216, "num_hidden_layers": 8, "num_attention_heads": 8, "vocab_size": 8192},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "3b": {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
           "num_key_value_heads": 8, "vocab_size": 128256},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256},
}  # fmt: skip
"""Shapes of Llamas: ``s`` has 7.1 and ``m`` 31.7 million parameters; the last three are those of Llama 3."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """One training job."""

    size: str
    training: str = "full"
    """``full`` or ``lora`` (rank 8 on all linear layers)."""
    rows: int = 2
    tokens: int = 128
    steps: int = 12
    lr: float = 1e-3
    fused: bool = False
    """AdamW in one kernel; torch's default on CPU is a loop over parameters."""
    accumulate: int = 1
    precision: str = "32-true"
    device: str = "cpu"
    lora_r: int = 8

    @property
    def micro_batches(self) -> int:
        return self.steps * self.accumulate


def llama_config(size: str, tokens: int) -> LlamaConfig:
    return LlamaConfig(**SIZES[size], max_position_embeddings=max(tokens, 64), use_cache=False)


def build(work: Work) -> Any:
    """The model: the same weights and adapters whenever it is called."""
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(llama_config(work.size, work.tokens))
    return lora(model, r=work.lora_r, seed=SEED) if work.training == "lora" else model


def batches(work: Work, rank: int) -> Iterator[Tensor]:
    """Token ids (rows, tokens) of every micro-batch of a rank."""
    for index in range(work.micro_batches):
        generator = torch.Generator().manual_seed(1_000_003 * rank + index)
        tokens = torch.randint(0, SIZES[work.size]["vocab_size"], (work.rows, work.tokens), generator=generator)
        yield tokens.to(work.device)


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """The model's own mean loss; labels are the input."""
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def make_optimizer(parameters: Any, work: Work) -> torch.optim.Optimizer:
    """AdamW over what trains."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=work.lr, **({"fused": True} if work.fused else {}))
