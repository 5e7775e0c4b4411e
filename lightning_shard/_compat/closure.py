"""The moment between backward and the update, which Lightning's precision plugins know by a private method."""

from typing import Any

from typing_extensions import override

from lightning_shard._compat import Precision

__all__ = ["ClosurePrecision"]


class ClosurePrecision(Precision):
    """Tells when an optimizer's gradients are final: reduced, unscaled and clipped.

    Lightning's hooks before the update run before clipping, and torch's before the closure; can go when either has one
    after them.
    """

    def gradients_are_final(self, optimizer: Any) -> None:
        """Called once per update, right before it."""

    @override
    def _after_closure(self, model: Any, optimizer: Any) -> None:
        super()._after_closure(model, optimizer)
        self.gradients_are_final(optimizer)
