"""A model whose weights the strategy reads straight into shards, where its files allow that."""

import json
import logging
from pathlib import Path
from typing import Any

import torch

from lightning_shard.pretrained import from_pretrained, unread

log = logging.getLogger(__name__)


def reads_streams(strategy: Any) -> bool:
    """Whether ``strategy`` gives a model on the meta device its weights."""
    from lightning_shard.strategies.base import PlanStrategy

    return isinstance(strategy, PlanStrategy)


def streamed_model(path: str, dtype: torch.dtype) -> Any:
    """The causal language model of a local folder on the meta device; None, said in a log line, where it must be loaded
    whole on every rank: files that are not safetensors, a quantised base, tensors that are not those of the model.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return None  # the hub's cache is read by transformers
    try:
        model, reason = None, _needs_conversion(folder)
        if reason is None:
            model = from_pretrained(str(folder), dtype=dtype)
            reason = _differs(model)
    except (ValueError, OSError) as error:
        reason = str(error).splitlines()[0]
    if reason is None:
        return model
    log.info("%s is loaded whole on every rank, since its weights cannot be streamed into shards: %s", path, reason)
    return None


def _needs_conversion(folder: Path) -> str | None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return "it is quantised, and transformers knows how to unpack it" if "quantization_config" in config else None


def _differs(model: Any) -> str | None:
    missing = unread(model)
    return f"no file holds {missing[0]!r}, which transformers may make from others" if missing else None
