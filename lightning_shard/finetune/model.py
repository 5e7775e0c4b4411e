"""A pretrained causal language model as a LightningModule, with adapters or trained in full."""

from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from lightning_shard.finetune.agree import on_all_ranks
from lightning_shard.finetune.batches import Batch
from lightning_shard.finetune.encode import IGNORED
from lightning_shard.finetune.hub import pretrained
from lightning_shard.finetune.loss import TokenMeanLoss
from lightning_shard.specs import AdapterSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TRUE_TYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
"""Precisions that load the model in the type it computes in; FP32 otherwise."""


class CausalLM(TokenMeanLoss):
    """Fine-tunes a causal language model from a folder or the hub; loss is the mean over label tokens.

    Args:
        path: folder with a ``config.json`` and weights, or a hub id.
        lora: the adapter to train on the frozen model; null trains the model itself.
        learning_rate: its peak, reached after the warm-up; it then falls along a cosine to 0.
        weight_decay: of matrices; vectors (norms, biases) never decay.
        warmup_steps: optimizer steps from 0 to the peak.
        fused: AdamW in one kernel per group instead of one per operation.
    """

    def __init__(
        self,
        path: str,
        lora: AdapterSpec | None = None,
        learning_rate: float = 2e-4,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        fused: bool = True,
    ) -> None:
        super().__init__()
        self.path = path
        self.lora = lora
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.fused = fused
        self.model: PreTrainedModel | None = None

    @override
    def configure_model(self) -> None:
        """Load the model, in the compute type where precision is a ``-true`` one, and add the adapters."""
        if self.model is None:
            dtype = TRUE_TYPES.get(str(self.trainer.precision), torch.float32)
            self.model = on_all_ranks(lambda: load(self.path, self.lora, dtype))

    @override
    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits (rows, tokens, vocabulary); nothing is cached for generation."""
        assert self.model is not None, "configure_model has not run"
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.train_on(*token_loss(self(batch["input_ids"]), batch["labels"]))

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.validate_on(*token_loss(self(batch["input_ids"]), batch["labels"]))

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        from transformers import get_cosine_schedule_with_warmup

        optimizer = torch.optim.AdamW(self._groups(), lr=self.learning_rate, fused=self.fused)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = get_cosine_schedule_with_warmup(optimizer, self.warmup_steps, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _groups(self) -> list[dict[str, Any]]:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        matrices = [parameter for parameter in trained if parameter.ndim >= 2]
        vectors = [parameter for parameter in trained if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": self.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        return [group for group in groups if group["params"]]


def token_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropy of the label tokens, and their number.

    Args:
        logits: (rows, tokens, vocabulary); each position predicts the next token.
        labels: (rows, tokens); :data:`IGNORED` where nothing is learned.
    """
    targets = labels[:, 1:]
    learned = targets != IGNORED
    # Only the label tokens' logits are taken to FP32: with short answers a small part of them.
    loss = functional.cross_entropy(logits[:, :-1][learned].float(), targets[learned], reduction="sum")
    return loss, learned.sum()


def load(path: str, lora: AdapterSpec | None, dtype: torch.dtype) -> "PreTrainedModel":
    """The pretrained model, with fresh adapters if asked for.

    Raises:
        ValueError: when there is no such model, or the adapter matches nothing in it.
    """
    from transformers import AutoModelForCausalLM

    model = pretrained(AutoModelForCausalLM, path, dtype=dtype)
    return (model if lora is None else add_adapters(model, lora)).train()  # from_pretrained leaves it in eval mode


def add_adapters(model: nn.Module, lora: AdapterSpec) -> Any:
    """The model in peft's wrapper; only adapters train."""
    from lightning_shard.adapters import lora as inject

    targets = lora.target_modules if isinstance(lora.target_modules, str) else list(lora.target_modules)
    return inject(
        model,
        r=lora.r,
        method=lora.method,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        modules_to_save=list(lora.modules_to_save) or None,
        task_type="CAUSAL_LM",
    )
