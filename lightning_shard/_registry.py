"""The strategy names in Lightning's registry, without importing Lightning.

``lightning.pytorch`` and ``pytorch_lightning`` are separate packages with a registry each. A name is
registered at once where the package is imported already, by a post-import hook where it comes later.
"""

import importlib
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from wrapt import when_imported

PACKAGES = ("lightning.pytorch", "pytorch_lightning")

STRATEGIES = {
    "auto-shard": ("AutoShardStrategy", "Chooses between DDP and sharding, and shards just enough, at setup"),
    "fsdp2": ("FSDP2Strategy", "Shards every block with FSDP2"),
    "tuned-ddp": ("TunedDDPStrategy", "DDP with buckets sized for what is trained"),
}


def register_strategies() -> None:
    """Register the strategy names with every Lightning package, now or once it is imported."""
    for package in PACKAGES:
        when_imported(f"{package}.strategies")(partial(_register, package))


def _register(package: str, module: ModuleType) -> None:
    for name, (class_name, description) in STRATEGIES.items():
        # override: this file may run twice in one process (a reload, a second finder)
        module.StrategyRegistry.register(
            name, _factory(package, name, class_name), description=description, override=True
        )


def _factory(package: str, name: str, class_name: str) -> Callable[..., Any]:
    """A function that makes the strategy, so that registering it imports nothing."""

    def make(**kwargs: Any) -> Any:
        strategy = getattr(importlib.import_module("lightning_shard.strategies"), class_name)
        if not issubclass(strategy, sys.modules[f"{package}.strategies"].Strategy):
            raise RuntimeError(_mixed_message(package, name))
        return strategy(**kwargs)

    make.__name__ = make.__qualname__ = class_name
    return make


def _mixed_message(package: str, name: str) -> str:
    other = next(other for other in PACKAGES if other != package)
    return (
        f"strategy={name!r} was given to a Trainer of {package}, but both {package} and {other} are imported and "
        f"lightning_shard builds on {other}: classes of the two packages do not mix. Import everything from "
        f"{other}, or nothing from it."
    )
