"""What an adapter adds to a model."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from lightning_shard.specs.sizes import require_choice, require_count

AdapterMethod = Literal["lora", "rslora", "dora"]
ALL_LINEAR: Literal["all-linear"] = "all-linear"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSpec:
    """A low-rank adapter: beside a frozen weight (out, in) stand ``lora_A`` (r, in) and ``lora_B`` (out, r).

    Raises:
        ValueError: when a field is out of range.
    """

    method: AdapterMethod = "lora"
    """``rslora`` differs from ``lora`` in its scale only; ``dora`` adds a magnitude (out,) per weight."""
    r: int = 16
    """Rank."""
    alpha: float = 32.0
    """Scale: the adapter's output is multiplied by alpha / r (alpha / sqrt(r) for rslora)."""
    dropout: float = 0.0
    """Dropout on each adapter's input; above 0 every adapted module keeps its own masked input."""
    target_modules: tuple[str, ...] | Literal["all-linear"] = ALL_LINEAR
    """Modules to adapt, by the last parts of their names, or every linear layer except the head."""
    modules_to_save: tuple[str, ...] = ()
    """Modules trained in full beside the adapters (a copy of each is added, as peft does)."""
    compute_dtype: str | None = None
    """Type in which the adapter's products run; None follows the precision. ``float32`` describes plain
    peft without autocast, which casts each adapted module's input up and keeps the copy for backward."""

    def __post_init__(self) -> None:
        for name in ("target_modules", "modules_to_save"):
            if isinstance(getattr(self, name), list):  # JSON has no tuples
                object.__setattr__(self, name, tuple(getattr(self, name)))
        require_choice("method", self.method, get_args(AdapterMethod))
        require_count("r", self.r)
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, (int, float)) or not 0.0 < self.alpha < math.inf:
            raise ValueError(f"alpha={self.alpha!r} must be a number above 0.")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout} must be at least 0 and below 1.")
        if isinstance(self.target_modules, str) and self.target_modules != ALL_LINEAR:
            raise ValueError(
                f"target_modules={self.target_modules!r} must be a tuple of module names or {ALL_LINEAR!r}. "
                f"For one module write ({self.target_modules!r},)."
            )
        if not self.target_modules:
            raise ValueError(
                "target_modules is empty: an adapter needs at least one module. Name some, or 'all-linear'."
            )

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        values = dataclasses.asdict(self)
        for name in ("target_modules", "modules_to_save"):
            if isinstance(values[name], tuple):
                values[name] = list(values[name])
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "AdapterSpec":
        """The adapter that :meth:`to_dict` wrote."""
        return cls(**values)
