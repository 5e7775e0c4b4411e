"""A pretrained causal language model as a LightningModule, with adapters or trained in full."""

import logging
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from lightning_shard.finetune.batches import Batch
from lightning_shard.finetune.encode import IGNORED
from lightning_shard.finetune.fit import choose_batch
from lightning_shard.finetune.hub import pretrained as from_hub
from lightning_shard.finetune.hub import pretrained_model
from lightning_shard.finetune.limits import require_choices
from lightning_shard.finetune.linear_loss import LogitRule, follows_rule, has_liger, head_loss, require_liger
from lightning_shard.finetune.packing import require_packable
from lightning_shard.finetune.streamed import reads_streams, streamed_model
from lightning_shard.finetune.tuned import TunedModel
from lightning_shard.parallelize.together import on_all_ranks
from lightning_shard.parallelize.vocabulary import split_head
from lightning_shard.specs import AdapterSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

LOSSES = ("auto", "chunked", "liger", "full")


class CausalLM(TunedModel):
    """Trains a causal language model from a folder or the hub; loss is the mean over label tokens.

    Args:
        path: folder with a ``config.json`` and weights, or a hub id.
        lora: the adapter to train on the frozen model; null trains the model itself.
        pretrained: start from the model's weights; otherwise its config is enough, and they are drawn at random.
        learning_rate: its peak, reached after the warm-up; it then falls along a cosine to 0.
        weight_decay: of matrices; vectors (norms, biases) never decay.
        warmup_steps: optimizer steps from 0 to the peak.
        fused: AdamW in one kernel per group instead of one per operation.
        loss: ``chunked`` never has the logits of more than a thousand tokens at a time, ``liger`` does so with Liger's
            kernel, ``full`` takes the model's own logits; ``auto`` uses Liger on a GPU where it is installed, else
            chunks where the model's logits are its head's output.

    Raises:
        ValueError: for a value out of range.
    """

    def __init__(
        self,
        path: str,
        lora: AdapterSpec | None = None,
        pretrained: bool = True,
        learning_rate: float = 2e-4,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        fused: bool = True,
        loss: Literal["auto", "chunked", "liger", "full"] = "auto",
    ) -> None:
        super().__init__(
            path,
            lora=lora,
            pretrained=pretrained,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            warmup_steps=warmup_steps,
            fused=fused,
        )
        require_choices("model.loss", loss, LOSSES)
        self.loss = loss
        self.model: PreTrainedModel | None = None
        self._rule: LogitRule | None = None
        """How logits follow from the head's output, where the loss takes them in chunks."""

    @property
    def planned_loss(self) -> str:
        """What becomes of the logits, in the planner's words."""
        return "full" if self._rule is None else "chunked"

    @override
    def configure_model(self) -> None:
        """Load the model, in the compute type where precision is a ``-true`` one, and add the adapters."""
        if self.model is None:
            base = on_all_ranks(lambda: self._load())
            self._rule = on_all_ranks(lambda: self._logit_rule(base))
            if getattr(getattr(self.trainer, "datamodule", None), "packing", False):
                on_all_ranks(lambda: require_packable(base))
            self.model = on_all_ranks(lambda: base if self.lora is None else add_adapters(base, self.lora))
            choose_batch(self)

    def _load(self) -> "PreTrainedModel":
        streams = reads_streams(self.trainer.strategy)
        return load(self.path, self.loaded_dtype, pretrained=self.pretrained, stream=streams)

    @override
    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Logits (rows, tokens, vocabulary); nothing is cached for generation."""
        assert self.model is not None, "configure_model has not run"
        logits: Tensor = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=False).logits
        return logits

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.train_on(*self.loss_of(batch))

    @override
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.validate_on(*self.loss_of(batch))

    def loss_of(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Sum of the cross-entropy of a batch's label tokens, and their number."""
        ids, positions, labels = batch["input_ids"], batch.get("position_ids"), batch["labels"]
        if self._rule is None:
            return token_loss(self(ids, positions), labels)
        model: Any = self.model
        targets = labels[:, 1:]
        learned = targets != IGNORED
        hidden = model.get_decoder()(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        head, wanted = model.get_output_embeddings(), targets[learned]
        liger = self.loss == "liger" or (
            self.loss == "auto" and ids.is_cuda and has_liger() and split_head(head) is None
        )
        loss = head_loss(head, hidden[:, :-1][learned], wanted, self._rule, liger=liger)
        return loss, learned.sum()

    def _logit_rule(self, model: Any) -> LogitRule | None:
        if self.loss == "full":
            return None
        rule = LogitRule.of(model.config.get_text_config())
        if follows_rule(model, rule):
            require_liger(self.loss)
            return rule
        said = f"The logits of {type(model).__name__} are not known to be its head's output"
        if self.loss != "auto":
            raise ValueError(f"{said}, so the loss cannot take them in chunks. Set model.loss to full.")
        log.warning("%s: the loss needs those of all tokens at once (model.loss: full).", said)
        return None


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


def load(path: str, dtype: torch.dtype, *, pretrained: bool = True, stream: bool = False) -> "PreTrainedModel":
    """The model, ready to train.

    Args:
        path: folder or hub id.
        dtype: of its weights.
        pretrained: with its weights, rather than drawn at random.
        stream: leave it on the meta device where its files allow that; the strategy reads them straight into shards.

    Raises:
        ValueError: when there is no such model, or weights are missing.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if pretrained and stream:
        streamed = streamed_model(path, dtype)
        if streamed is not None:
            return streamed  # type: ignore[no-any-return]
    if pretrained:
        model = pretrained_model(AutoModelForCausalLM, path, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_config(from_hub(AutoConfig, path), dtype=dtype)
    return model.train()  # type: ignore[no-any-return]  # from_pretrained leaves it in eval mode


def add_adapters(model: nn.Module, lora: AdapterSpec, task_type: str | None = "CAUSAL_LM") -> Any:
    """The model in peft's wrapper of that task; only adapters train, and what ``modules_to_save`` names."""
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
        task_type=task_type,
    )
