"""A model whose weights the strategy reads straight into shards, where its files allow that."""

import json
import logging
from pathlib import Path
from typing import Any

import torch

from lightning_shard.parallelize.materialize import start_anew
from lightning_shard.pretrained import from_pretrained, model_folder, unread

log = logging.getLogger(__name__)


def reads_streams(strategy: Any) -> bool:
    """Whether ``strategy`` gives a model on the meta device its weights."""
    from lightning_shard.strategies.base import PlanStrategy

    return isinstance(strategy, PlanStrategy)


def streamed_model(
    path: str, dtype: torch.dtype, *, auto_class: Any = None, new: tuple[str, ...] = (), **config: Any
) -> Any:
    """A transformers model on the meta device; None, said in a log line, where it must be loaded whole on every rank:
    files that are not safetensors, a quantised base, tensors that are not those of the model.

    Args:
        path: folder or hub id, whose snapshot is looked up in the hub's cache, or fetched.
        dtype: of its weights.
        auto_class: causal language models by default.
        new: parts of names that may be missing or of another shape, as a head that is trained from the start.
        config: what to change in its config.
    """
    from transformers import AutoConfig

    try:
        folder = model_folder(path)
        model: Any = None
        reason = _needs_conversion(folder)
        if reason is None:
            changed = AutoConfig.from_pretrained(folder, **config) if config else None
            model = from_pretrained(path, auto_class=auto_class, dtype=dtype, config=changed, new=new)
            reason = _differs(model, new)
    except (ValueError, OSError) as error:
        reason = str(error).splitlines()[0]
    if reason is None:
        start_anew(model, unread(model), torch.initial_seed())
        return model
    log.info("%s is loaded whole on every rank, since its weights cannot be streamed into shards: %s", path, reason)
    return None


def _needs_conversion(folder: Path) -> str | None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return "it is quantised, and transformers knows how to unpack it" if "quantization_config" in config else None


def _differs(model: Any, new: tuple[str, ...]) -> str | None:
    missing = [name for name in unread(model) if not any(part in name for part in new)]
    return f"no file holds {missing[0]!r}, which transformers may make from others" if missing else None
