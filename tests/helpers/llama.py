"""A Llama of a few thousand parameters, and the token sequences it is trained on."""

from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_shard import lora
from lightning_shard.parallelize.materialize import seeded
from lightning_shard.testing import GlobalBatchSampler

NUM_BLOCKS = 3
VOCABULARY = 64
GLOBAL_BATCH = 8
EPS = 1e-4
"""Of AdamW. With a tiny one the first steps are lr * sign(gradient): rounding noise in a gradient near zero
becomes a whole step, while a gradient that is wrong by a factor changes nothing."""

Training = Literal["full", "lora", "rslora", "dora"]
"""Every weight, or adapters of a method."""


def llama_config(*, tied: bool = False, **changes: Any) -> LlamaConfig:
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": NUM_BLOCKS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
    }
    return LlamaConfig(**{**sizes, "tie_word_embeddings": tied, "use_cache": False, **changes})


def make_llama(*, tied: bool = False, **changes: Any) -> LlamaForCausalLM:
    """The same weights whenever it is called."""
    torch.manual_seed(1)
    return LlamaForCausalLM(llama_config(tied=tied, **changes))


class TinyLlama(LightningModule):
    """Trains a tiny Llama fully or through adapters."""

    def __init__(
        self, training: Training = "full", *, tied: bool = False, late: bool = False, lr: float = 1e-3
    ) -> None:
        super().__init__()
        self.training_kind = training
        self.tied = tied
        self.lr = lr
        self.model: Any = None
        if not late:
            self._build()

    def configure_model(self) -> None:
        if self.model is None:
            self._build()

    def _build(self) -> None:
        self.model = self.adapted(make_llama(tied=self.tied))

    def adapted(self, model: Any) -> Any:
        """``model`` as this module trains it."""
        return model if self.training_kind == "full" else lora(model, r=4, seed=7, method=self.training_kind)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        (tokens,) = batch
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=self.lr, eps=EPS)


class AdaptedVocabulary(TinyLlama):
    """An adapter on embedding and head, or (``full``) a copy of each that trains whole."""

    def _build(self) -> None:
        ends = ["embed_tokens", "lm_head"]
        targets: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ends}
        if self.training_kind != "full":
            targets = {"target_modules": ["q_proj", "down_proj", *ends], "method": self.training_kind}
        self.model = lora(make_llama(), r=4, seed=7, **targets)
        for name, parameter in self.model.named_parameters():
            if "lora_embedding_A" in name or "lora_B" in name:  # from zero little would move
                with seeded(7, name):
                    nn.init.normal_(parameter, std=0.1)


def make_tokens(rank: int, world_size: int) -> DataLoader[tuple[Tensor, ...]]:
    """This rank's part of global batches of 8 sequences of 12 tokens."""
    generator = torch.Generator().manual_seed(2)
    dataset = TensorDataset(torch.randint(0, VOCABULARY, (12 * GLOBAL_BATCH, 12), generator=generator))
    sampler = GlobalBatchSampler(len(dataset), GLOBAL_BATCH, rank=rank, world_size=world_size)
    return DataLoader(dataset, batch_sampler=sampler)
