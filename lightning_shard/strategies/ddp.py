"""The replicated end of the dial."""

from typing import Any, Literal

from typing_extensions import override

from lightning_shard._compat import Trainer
from lightning_shard.plans import Plan
from lightning_shard.strategies.base import PlanStrategy


class TunedDDPStrategy(PlanStrategy):
    """Replicas, with FP32 masters of what trains and gradients that are views of what is reduced.

    Where a part is frozen (adapters) and none of DDP's own options is used, gradients lie in the engine's flat
    buffers; otherwise torch's DDP carries the plan out, with buckets sized from what trains.

    Args:
        bucket_cap_mb: MiB of gradients per all-reduce; None sizes it from the trainable bytes and the
            world size (:func:`lightning_shard.plans.tuned_bucket_bytes`).
        static_graph: every step uses the same parameters in the same order.
        activation_checkpoint: what is recomputed in backward.
        compile: compile each block with ``torch.compile``.
        ddp: anything else that Lightning's ``DDPStrategy`` takes: ``find_unused_parameters`` (False by
            default; unused parameters are then an error that names them, and in flat buffers no matter), ``gradient_as_bucket_view``
            (True), ``ddp_comm_hook``, ``process_group_backend``...
    """

    def __init__(
        self,
        *,
        bucket_cap_mb: float | None = None,
        static_graph: bool = False,
        activation_checkpoint: Literal["none", "selective", "full"] = "none",
        compile: bool = False,
        **ddp: Any,
    ) -> None:
        super().__init__(**ddp)
        self._fields: dict[str, Any] = {
            "bucket_cap_mb": bucket_cap_mb,
            "static_graph": static_graph,
            "activation_checkpoint": activation_checkpoint,
            "compile": compile,
        }
        Plan(**self._fields)  # a wrong value is told now, not at setup

    @override
    def choose_plan(self, trainer: Trainer) -> Plan:
        lora = any(not p.requires_grad for p in self._root.parameters())
        asked = self._asks_torch_ddp or self._fields["bucket_cap_mb"] is not None or self._fields["static_graph"]
        return Plan(dp_replicate=self.world_size, torch_ddp=asked or not lora, **self._fields)

    @override
    def wishes(self) -> dict[str, str]:
        return {**super().wishes(), **{name: repr(value) for name, value in self._fields.items()}}
