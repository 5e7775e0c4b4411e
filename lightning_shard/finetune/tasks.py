"""What a recipe can train: a module and its data, by name."""

import difflib
import importlib
from typing import Any

TASKS: dict[str, tuple[str, str]] = {
    "causal-lm": ("model.CausalLM", "data.InstructionData"),
    "text-classification": ("classify.TextClassifier", "labelled.LabelledText"),
    "image-classification": ("classify.ImageClassifier", "labelled.LabelledImages"),
}
"""Task to module and data module, below this package."""

DEFAULT = "causal-lm"

PROCESSOR: dict[str, str] = {
    "causal-lm": "tokenizer",
    "text-classification": "tokenizer",
    "image-classification": "processor",
}
"""Which argument of a task's data names the model's own preprocessing."""


def classes(task: str) -> tuple[type[Any], type[Any]]:
    """The module's and the data module's class.

    Raises:
        ValueError: for a task that is not known.
    """
    if task not in TASKS:
        close = difflib.get_close_matches(str(task), TASKS, n=1)
        meant = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"task: {task!r} is not known.{meant} Use one of {', '.join(TASKS)}.")
    module, data = (_load(name) for name in TASKS[task])
    return module, data


def _load(name: str) -> type[Any]:
    file, _, class_name = name.partition(".")
    found: type[Any] = getattr(importlib.import_module(f"lightning_shard.finetune.{file}"), class_name)
    return found
