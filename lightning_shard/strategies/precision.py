"""Lightning's precision plugins, with FP32 masters and clipping that knows shards.

A strategy given by name gets Lightning's own plugin, whatever it was constructed with, so the strategy
translates every plugin it is handed. The classes derive from Lightning's, since callbacks and the
Trainer ask for those by ``isinstance``.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard._compat import DoublePrecision, HalfPrecision, MixedPrecision
from lightning_shard._compat import Precision as PrecisionPlugin
from lightning_shard._compat.closure import ClosurePrecision
from lightning_shard._compat.sharded import AgreeingGradScaler
from lightning_shard.parallelize.clipping import clip_by_norm, clip_by_value
from lightning_shard.parallelize.host_update import HostUpdate
from lightning_shard.specs import Precision, find_precision


class ShardAwarePrecision(ClosurePrecision):
    """What the four plugins share. ``parallelize`` sets the parameters' types, so nothing is converted here."""

    meaning: Precision = find_precision("32-true")
    last_norm: Tensor | None = None
    """Of all gradients, before the latest clipping by norm."""
    host_update: HostUpdate | None = None
    """Runs updates on the host, where the plan has the optimizer's state wait there."""

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        return module

    @override
    def gradients_are_final(self, optimizer: Any) -> None:
        if self.host_update is not None:
            self.host_update.begin(optimizer)

    @override
    def optimizer_step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().optimizer_step(optimizer, *args, **kwargs)
        finally:
            if self.host_update is not None:
                self.host_update.end(optimizer)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        self.last_norm = clip_by_norm(self.main_params(optimizer), float(clip_val))

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        clip_by_value(self.main_params(optimizer), float(clip_val))


class MasterFullPrecision(ShardAwarePrecision):
    """``32-true``."""


class MasterDoublePrecision(ShardAwarePrecision, DoublePrecision):
    """``64-true``."""

    meaning = find_precision("64-true")


class MasterHalfPrecision(ShardAwarePrecision, HalfPrecision):
    """``bf16-true``: frozen weights and products in bf16, FP32 masters of what trains."""

    meaning = find_precision("bf16-true")

    @override
    @contextmanager
    def tensor_init_context(self) -> Generator[None, None, None]:
        # Built in FP32: a master that starts from a rounded value would not start where the user put it.
        yield


class MasterMixedPrecision(ShardAwarePrecision, MixedPrecision):
    """``bf16-mixed`` and ``16-mixed``: everything stored in FP32, products in the narrow type."""

    policy_casts: bool = False
    """Under a sharded plan FSDP's policy is the only caster and autocast stays off."""

    def follow(self, *, sharded: bool) -> None:
        """Leave casting to FSDP's policy under a sharded plan, and have the scaler's decision agree on all ranks."""
        self.policy_casts = sharded
        if sharded and self.scaler is not None and not isinstance(self.scaler, AgreeingGradScaler):
            self.scaler = AgreeingGradScaler.like(self.scaler, self.device)

    @override
    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        if self.policy_casts:
            yield
            return
        with self.autocast_context_manager():
            yield

    @override
    def clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        if self.scaler is None:
            # Lightning refuses every fused optimizer here; only one that unscales by itself cannot be clipped.
            PrecisionPlugin.clip_gradients(self, optimizer, *args, **kwargs)
        else:
            super().clip_gradients(optimizer, *args, **kwargs)


def translate(plugin: PrecisionPlugin) -> ShardAwarePrecision:
    """Our plugin for the one Lightning chose.

    Raises:
        ValueError: for a precision that would train without FP32 masters, or that is not known.
    """
    if isinstance(plugin, ShardAwarePrecision):
        return plugin
    if type(plugin) is PrecisionPlugin:
        return MasterFullPrecision()
    if type(plugin) is DoublePrecision:
        return MasterDoublePrecision()
    if type(plugin) is HalfPrecision and plugin.precision == "bf16-true":
        return MasterHalfPrecision("bf16-true")
    if type(plugin) is MixedPrecision:
        mixed = MasterMixedPrecision(plugin.precision, plugin.device, plugin.scaler)  # type: ignore[arg-type]
        mixed.meaning = find_precision(plugin.precision)
        return mixed
    find_precision(getattr(plugin, "precision", type(plugin).__name__))  # raises with the list of what is known
    raise ValueError(
        f"The precision plugin {type(plugin).__name__} is not supported: use Trainer(precision=...) instead."
    )
