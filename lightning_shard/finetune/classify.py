"""Classifiers of texts and images: a pretrained encoder with a new head, adapted or trained in full."""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from lightning_shard.finetune.encode import IGNORED
from lightning_shard.finetune.hub import pretrained, pretrained_model
from lightning_shard.finetune.model import add_adapters
from lightning_shard.finetune.streamed import reads_streams, streamed_model
from lightning_shard.finetune.tuned import TunedModel
from lightning_shard.parallelize.together import on_all_ranks
from lightning_shard.specs import AdapterSpec

HEADS = ("classifier", "score")
"""What transformers calls the layers that are new in a classifier."""


class Classifier(TunedModel):
    """Trains a classifier; the loss is the mean over rows, logged with the share of right answers.

    Args:
        path: folder with a ``config.json`` and weights, or a hub id.
        lora: the adapter to train beside the new head; null trains the model itself.
        pretrained: start from the encoder's weights; otherwise its config is enough, and they are drawn at random.
        learning_rate: its peak, reached after the warm-up; it then falls along a cosine to 0.
        weight_decay: of matrices; vectors (norms, biases) never decay.
        warmup_steps: optimizer steps from 0 to the peak.
        fused: AdamW in one kernel per group instead of one per operation.

    Raises:
        ValueError: for a value out of range.
    """

    auto_class = ""
    """Name of the transformers class that builds the model."""

    def __init__(
        self,
        path: str,
        lora: AdapterSpec | None = None,
        pretrained: bool = True,
        learning_rate: float = 5e-5,
        weight_decay: float = 0.0,
        warmup_steps: int = 0,
        fused: bool = True,
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
        self.model: Any = None
        self._right: Tensor | None = None

    @override
    def configure_model(self) -> None:
        if self.model is None:
            names: list[str] = self.trainer.datamodule.label_names  # type: ignore[attr-defined]
            model = on_all_ranks(lambda: self._load(names))
            self.model = on_all_ranks(
                lambda: model if self.lora is None else add_adapters(model, _with_head(self.lora, model), None)
            )

    @override
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Logits (rows, labels)."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits: Tensor = self.model(**inputs).logits
        return logits

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss, number, _ = self._loss(batch)
        return self.train_on(loss, number)

    @override
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss, number, right = self._loss(batch)
        self.validate_on(loss, number)
        pair = torch.stack([right, number]).float()
        self._right = pair if self._right is None else self._right + pair

    @override
    def on_validation_epoch_start(self) -> None:
        super().on_validation_epoch_start()
        self._right = None

    @override
    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        if self._right is not None:
            total = self.trainer.strategy.reduce(self._right, reduce_op="sum")
            assert isinstance(total, Tensor)
            self.log("val_accuracy", total[0] / total[1].clamp(min=1), prog_bar=True, sync_dist=True)

    def _loss(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Sum of the rows' losses, their number, and how many are right."""
        labels = batch["labels"]
        logits = self(batch).float()
        loss = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        return loss, (labels != IGNORED).sum(), (logits.argmax(-1) == labels).sum()

    def _load(self, names: list[str]) -> Any:
        import transformers

        auto = getattr(transformers, self.auto_class)
        labels: dict[str, Any] = {
            "id2label": dict(enumerate(names)),
            "label2id": {name: i for i, name in enumerate(names)},
        }
        dtype = self.loaded_dtype
        new = (*HEADS, "pooler")
        if self.pretrained and reads_streams(self.trainer.strategy):
            streamed = streamed_model(self.path, dtype, auto_class=auto, new=new, **labels)
            if streamed is not None:
                return streamed
        if self.pretrained:
            options = {"dtype": dtype, "ignore_mismatched_sizes": True, **labels}  # a head for other labels is replaced
            return pretrained_model(auto, self.path, new=new, **options).train()
        config = pretrained(transformers.AutoConfig, self.path, **labels)
        return auto.from_config(config, dtype=dtype).train()


class TextClassifier(Classifier):
    """A classifier of texts, on :class:`LabelledText`."""

    auto_class = "AutoModelForSequenceClassification"


class ImageClassifier(Classifier):
    """A classifier of images, on :class:`LabelledImages`."""

    auto_class = "AutoModelForImageClassification"


def _with_head(lora: AdapterSpec, model: Any) -> AdapterSpec:
    """The adapter with the new head trained in full beside it."""
    heads = tuple(name for name in HEADS if hasattr(model, name))
    return dataclasses.replace(lora, modules_to_save=(*lora.modules_to_save, *heads))
