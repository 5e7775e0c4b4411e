"""What every model that the recipes train has: where it comes from, its adapter, and AdamW along a cosine."""

from typing import Any

import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import nn
from typing_extensions import override

from lightning_shard.finetune.fit import go_on, num_steps
from lightning_shard.finetune.limits import require_at_least
from lightning_shard.finetune.loss import TokenMeanLoss
from lightning_shard.specs import AdapterSpec

TRUE_TYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16, "64-true": torch.float64}
"""Precisions that load the model in the type it computes in; FP32 otherwise."""


class TunedModel(TokenMeanLoss):
    """A pretrained model that is adapted or trained in full; a subclass says which, and what its loss is.

    Args:
        path: folder with a ``config.json`` and weights, or a hub id.
        lora: the adapter to train on the frozen model; None trains the model itself.
        pretrained: start from the model's weights; otherwise its config is enough, and they are drawn at random.
        learning_rate: its peak, reached after the warm-up; it then falls along a cosine to 0.
        weight_decay: of matrices; vectors (norms, biases) never decay.
        warmup_steps: optimizer steps from 0 to the peak.
        fused: AdamW in one kernel per group instead of one per operation.

    Raises:
        ValueError: for a value out of range.
    """

    def __init__(
        self,
        path: str,
        *,
        lora: AdapterSpec | None,
        pretrained: bool,
        learning_rate: float,
        weight_decay: float,
        warmup_steps: int,
        fused: bool,
    ) -> None:
        super().__init__()
        values = {"learning_rate": learning_rate, "weight_decay": weight_decay, "warmup_steps": warmup_steps}
        require_at_least(0, **{f"model.{name}": value for name, value in values.items()})
        self.path = path
        self.lora = lora
        self.pretrained = pretrained
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.fused = fused

    @property
    def loaded_dtype(self) -> torch.dtype:
        """The type in which the model is loaded."""
        return TRUE_TYPES.get(str(self.trainer.precision), torch.float32)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        go_on(self.trainer)

    @override
    def configure_optimizers(self) -> OptimizerLRScheduler:
        from transformers import get_cosine_schedule_with_warmup

        optimizer = torch.optim.AdamW(decayed_groups(self, self.weight_decay), lr=self.learning_rate, fused=self.fused)
        schedule = get_cosine_schedule_with_warmup(optimizer, self.warmup_steps, num_steps(self.trainer))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def decayed_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """What trains, in groups for an optimizer: matrices decay, vectors (norms, biases) do not."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
