"""Checkpoints that do not know by which layout they were written."""

from collections.abc import Mapping
from pickle import UnpicklingError
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard.checkpoint.consolidated import (
    gather_module_state,
    gather_optimizer_state,
    load_module_state,
    load_optimizer_state,
)
from lightning_shard.strategies.laid_out import LaidOutStrategy


class PortableStateStrategy(LaidOutStrategy):
    """Saves whole state keyed by parameter name, and loads it, or Lightning's own, into the layout in force."""

    _weights_only: bool | None = None

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        # Lightning reads this before setup, when an auto strategy does not know its plan: always the same answer.
        return True

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return gather_module_state(self._root) if self.sharded else super().lightning_module_state_dict()

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        try:
            wanted = self._weights_only if weights_only is None else weights_only
            return super().load_checkpoint(checkpoint_path, weights_only=wanted)
        except UnpicklingError as error:
            raise UnpicklingError(
                f"{checkpoint_path} holds more than tensors and plain values. If you trust it, pass "
                f"{type(self).__name__}(weights_only=False). ({error})"
            ) from error

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if not self.sharded:
            super().load_model_state_dict(checkpoint, strict=strict)
            return
        self._rest()
        load_module_state(self._root, checkpoint["state_dict"], strict=strict)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if hasattr(optimizer, "consolidate_state_dict"):
            return super().optimizer_state(optimizer)
        self._rest()
        return gather_optimizer_state(self._root, _plain(optimizer), keep=self.is_global_zero)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._rest()
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            load_optimizer_state(self._root, _plain(optimizer), state)


def _plain(optimizer: Any) -> Optimizer:
    """The torch optimizer behind Lightning's wrapper."""
    inner = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(inner, Optimizer)
    return inner
