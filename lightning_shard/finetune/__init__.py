"""What recipes share: models, data, and the loss that counts tokens.

Names load what they need at first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_shard.finetune.classify import ImageClassifier, TextClassifier
    from lightning_shard.finetune.data import InstructionData
    from lightning_shard.finetune.labelled import LabelledImages, LabelledText
    from lightning_shard.finetune.loss import TokenMeanLoss
    from lightning_shard.finetune.model import CausalLM

__all__ = [
    "CausalLM",
    "ImageClassifier",
    "InstructionData",
    "LabelledImages",
    "LabelledText",
    "TextClassifier",
    "TokenMeanLoss",
]

_FILES = {
    "CausalLM": "model",
    "ImageClassifier": "classify",
    "InstructionData": "data",
    "LabelledImages": "labelled",
    "LabelledText": "labelled",
    "TextClassifier": "classify",
    "TokenMeanLoss": "loss",
}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"lightning_shard.finetune has no attribute {name!r}. It has {', '.join(__all__)}.")
    return getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)
