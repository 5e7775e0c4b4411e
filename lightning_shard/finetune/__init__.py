"""What recipes share: the causal language model, instruction data and the token-exact loss.

Names load what they need at first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_shard.finetune.data import InstructionData
    from lightning_shard.finetune.loss import TokenMeanLoss
    from lightning_shard.finetune.model import CausalLM

__all__ = ["CausalLM", "InstructionData", "TokenMeanLoss"]

_FILES = {"CausalLM": "model", "InstructionData": "data", "TokenMeanLoss": "loss"}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"lightning_shard.finetune has no attribute {name!r}. It has {', '.join(__all__)}.")
    return getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)
