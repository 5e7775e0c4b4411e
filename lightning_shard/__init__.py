"""Shard just enough: the fastest data-parallel layout that fits, for PyTorch Lightning.

Importing this package registers the strategy names ``"auto-shard"``, ``"fsdp2"`` and ``"tuned-ddp"`` with
Lightning and imports neither torch nor Lightning: public names load what they need at first use.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_shard._registry import register_strategies

if TYPE_CHECKING:
    from torch import nn

    from lightning_shard.adapters import lora, lora_plus
    from lightning_shard.hardware import Cluster
    from lightning_shard.memory import Estimate
    from lightning_shard.parallelize.clipping import grad_norm
    from lightning_shard.planner import Decision
    from lightning_shard.plans import Plan
    from lightning_shard.pretrained import from_pretrained, stream_weights
    from lightning_shard.specs import AdapterSpec, ModelSpec, TrainSpec
    from lightning_shard.strategies import AutoShardStrategy, FSDP2Strategy, TunedDDPStrategy

__version__ = "0.1.0"

__all__ = [
    "AdapterSpec",
    "AutoShardStrategy",
    "Cluster",
    "Decision",
    "Estimate",
    "FSDP2Strategy",
    "ModelSpec",
    "Plan",
    "TrainSpec",
    "TunedDDPStrategy",
    "__version__",
    "from_pretrained",
    "grad_norm",
    "lora",
    "lora_plus",
    "plan",
    "stream_weights",
]

_ROOMS = {
    "AdapterSpec": "specs",
    "AutoShardStrategy": "strategies",
    "Cluster": "hardware",
    "Decision": "planner",
    "Estimate": "memory",
    "FSDP2Strategy": "strategies",
    "ModelSpec": "specs",
    "Plan": "plans",
    "TrainSpec": "specs",
    "TunedDDPStrategy": "strategies",
    "from_pretrained": "pretrained",
    "grad_norm": "parallelize.clipping",
    "lora": "adapters",
    "lora_plus": "adapters",
    "stream_weights": "pretrained",
}
"""Public name to the file it lives in."""


def plan(
    model: "ModelSpec | nn.Module | str | Path",
    train: "TrainSpec | None" = None,
    cluster: "Cluster | None" = None,
    *,
    headroom: float = 0.1,
    pin: dict[str, Any] | None = None,
) -> "Decision":
    """Decide how to run a training job: the fastest plan that fits, and why the others were rejected.

    Args:
        model: a spec, a live or meta module, a folder with a ``config.json``, or a hub id.
        train: what the run wants; the defaults of :class:`TrainSpec` when left out.
        cluster: the devices; those of this machine when left out.
        headroom: the share of each device's memory to leave free.
        pin: fields of the :class:`Plan` that are not to be chosen.
    """
    from lightning_shard.hardware import Cluster
    from lightning_shard.planner import choose
    from lightning_shard.specs import ModelSpec, TrainSpec

    if isinstance(model, (str, Path)):
        spec = ModelSpec.from_pretrained(model)
    else:
        spec = model if isinstance(model, ModelSpec) else ModelSpec.from_module(model)
    return choose(spec, train or TrainSpec(), cluster or Cluster.detect(), headroom=headroom, pin=pin)


def __getattr__(name: str) -> Any:
    """Load a public name from its file at first use (PEP 562)."""
    room = _ROOMS.get(name)
    if room is None:
        raise AttributeError(f"lightning_shard has no attribute {name!r}. Its public names: {', '.join(__all__)}.")
    value = getattr(importlib.import_module(f"lightning_shard.{room}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_strategies()
