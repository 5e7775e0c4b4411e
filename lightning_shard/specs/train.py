"""What the user wants to train, and how."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from lightning_shard.specs.adapter import AdapterSpec
from lightning_shard.specs.optimizer import find_optimizer, require_implementation
from lightning_shard.specs.precision import Precision, dtype_bytes, find_precision
from lightning_shard.specs.sizes import require_choice, require_count

LOSSES = ("full", "narrow", "shifted", "kept", "chunked")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSpec:
    """The wishes that change what is learned; a Plan never touches them.

    Raises:
        ValueError: when a field is out of range or not known.
    """

    micro_batch_size: int = 1
    """Sequences per device and forward pass."""
    seq_len: int = 4096
    """Tokens per sequence, the longest one."""
    accumulate: int = 1
    """Micro-batches per optimizer step."""
    precision: str = "bf16-true"
    """Lightning's ``precision=``."""
    master_dtype: str | None = None
    """Storage of what trains; None follows the precision (FP32). ``bfloat16`` describes training without
    master weights, which loses small updates: for comparison with figures of other tools."""
    adapter: AdapterSpec | None = None
    """The adapter, or None to train what the model marks as trainable."""
    optimizer: str = "adamw"
    """A name of :data:`OPTIMIZERS`."""
    optimizer_implementation: Literal["foreach", "fused", "loop"] = "foreach"
    """How the step runs: torch's default on accelerators is foreach, which needs temporaries."""
    attention: Literal["sdpa", "eager"] = "sdpa"
    """``eager`` keeps every attention score for backward."""
    loss: Literal["full", "narrow", "shifted", "kept", "chunked"] = "full"
    """What becomes of the logits of all tokens: ``full`` casts them to FP32 and takes the cross-entropy, as
    transformers does; ``narrow`` leaves them in the compute dtype; ``shifted`` copies the FP32 logits once more
    (transformers 4.45 to 4.48); ``kept`` holds them through backward (a loop that keeps its output);
    ``chunked`` never has more than a chunk of them."""
    gradients_cleared: Literal["after_step", "before_backward"] = "after_step"
    """When a step's gradients are freed. Lightning's own loop clears them between the next forward and its
    backward, so that forward still holds them; a plain loop clears them after the step."""

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "seq_len", "accumulate"):
            require_count(name, getattr(self, name))
        find_precision(self.precision)
        find_optimizer(self.optimizer)
        require_implementation(self.optimizer_implementation)
        require_choice("attention", self.attention, ("sdpa", "eager"))
        require_choice("loss", self.loss, LOSSES)
        require_choice("gradients_cleared", self.gradients_cleared, ("after_step", "before_backward"))
        if self.master_dtype is not None:
            dtype_bytes(self.master_dtype)

    @property
    def tokens(self) -> int:
        """Tokens per device and forward pass."""
        return self.micro_batch_size * self.seq_len

    @property
    def precision_row(self) -> Precision:
        """The meaning of :attr:`precision`, with :attr:`master_dtype` applied."""
        row = find_precision(self.precision)
        if self.master_dtype is None:
            return row
        return dataclasses.replace(row, master_dtype=self.master_dtype)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["adapter"] = None if self.adapter is None else self.adapter.to_dict()
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "TrainSpec":
        """The wishes that :meth:`to_dict` wrote."""
        adapter = values.get("adapter")
        return cls(**{**values, "adapter": None if adapter is None else AdapterSpec.from_dict(adapter)})
