"""The replicated end of the dial."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard._compat import Trainer
from lightning_shard.parallelize import Parallelized, bucket_bytes
from lightning_shard.plans import MIB, Plan
from lightning_shard.strategies.base import PlanStrategy
from lightning_shard.strategies.tuning import BucketTuner

log = logging.getLogger(__name__)

Compression = Literal["none", "fp16", "bf16", "powersgd"]
WIRE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class TunedDDPStrategy(PlanStrategy):
    """Replicas, with FP32 masters of what trains and gradients that are views of what is reduced.

    Where a part is frozen (adapters) and none of DDP's own options is used, gradients lie in the engine's flat
    buffers; otherwise torch's DDP carries the plan out, with buckets sized from what trains.

    Args:
        bucket_cap_mb: MiB of gradients per all-reduce; None sizes it from the trainable bytes and the world size
            (:func:`lightning_shard.plans.tuned_bucket_bytes`). "tune" times a few sizes in the first steps of the run,
            all ranks take the one whose slowest rank is fastest, and :attr:`plan` says which it was.
        static_graph: every step uses the same parameters in the same order.
        activation_checkpoint: what is recomputed in backward.
        compile: compile each block with ``torch.compile``.
        offload: "optimizer" keeps the optimizer's state in host memory and updates there.
        compress: how gradients travel: as they are, rounded to "fp16" or "bf16" (half the bytes), or as PowerSGD's
            low-rank factors. Pays on slow links only, and changes what is learned by its rounding.
        ddp: anything else that Lightning's ``DDPStrategy`` takes: ``find_unused_parameters`` (False by
            default; unused parameters are then an error that names them, and in flat buffers no matter),
            ``gradient_as_bucket_view`` (True), ``ddp_comm_hook``, ``process_group_backend``...
    """

    def __init__(
        self,
        *,
        bucket_cap_mb: float | Literal["tune"] | None = None,
        static_graph: bool = False,
        activation_checkpoint: Literal["none", "selective", "full"] = "none",
        compile: bool = False,
        offload: Literal["none", "optimizer"] = "none",
        compress: Compression = "none",
        **ddp: Any,
    ) -> None:
        if isinstance(bucket_cap_mb, str) and bucket_cap_mb != "tune":
            raise ValueError(f"bucket_cap_mb={bucket_cap_mb!r} must be a number of MiB, 'tune' or None.")
        super().__init__(**ddp)
        self._tunes = bucket_cap_mb == "tune"
        self._compress = compress
        self._tuner: BucketTuner | None = None
        self._fields: dict[str, Any] = {
            "bucket_cap_mb": None if self._tunes else bucket_cap_mb,
            "static_graph": static_graph,
            "activation_checkpoint": activation_checkpoint,
            "compile": compile,
            "offload": offload,
        }
        Plan(**self._fields)  # a wrong value is told now, not at setup
        self._asks_torch_ddp |= static_graph or self._fields["bucket_cap_mb"] is not None or compress == "powersgd"
        self._check()

    def _check(self) -> None:
        if self._compress not in ("none", "powersgd", *WIRE_DTYPES):
            raise ValueError(f"compress={self._compress!r} must be 'none', 'fp16', 'bf16' or 'powersgd'.")
        if self._compress != "none" and self._ddp_comm_hook is not None:
            raise ValueError(f"compress={self._compress!r} is a communication hook too: leave ddp_comm_hook out.")
        if self._tunes and self._asks_torch_ddp:
            raise ValueError(
                "bucket_cap_mb='tune' changes the size while the run goes on, which torch's DDP cannot, and another option asks "
                "for DDP (static_graph, compress='powersgd', find_unused_parameters, a hook). Leave out one of the two."
            )

    @override
    def offload_wish(self) -> str:
        return str(self._fields["offload"])

    @override
    def choose_plan(self, trainer: Trainer) -> Plan:
        full = all(p.requires_grad for p in self._root.parameters())
        by_ddp = self._asks_torch_ddp or (full and not self._tunes and self._compress == "none")
        return Plan(dp_replicate=self.world_size, torch_ddp=by_ddp, **self._fields)

    @override
    def wishes(self) -> dict[str, str]:
        return {**super().wishes(), **{name: repr(value) for name, value in self._fields.items()}}

    @override
    def _setup_training(self, trainer: Trainer) -> None:
        if self._compress != "none":
            self._set_compression()
        super()._setup_training(trainer)
        self._tuner = None
        if self._tunes and self.world_size > 1:
            self._tuner = self._make_tuner()

    @override
    def take_layout(self, layout: Parallelized) -> None:
        super().take_layout(layout)
        if layout.replicated is not None:
            layout.replicated.wire_dtype = WIRE_DTYPES.get(self._compress)

    def _set_compression(self) -> None:
        if self._compress == "powersgd":
            self._ddp_comm_state, self._ddp_comm_hook = PowerSGDState(process_group=None), powerSGD_hook
        elif self._layout is None or self._layout.replicated is None:
            hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
            self._ddp_comm_hook = hooks[self._compress]  # refuses the backends that it does not run on

    def _make_tuner(self) -> BucketTuner | None:
        assert self._layout is not None
        if self._layout.replicated is None:
            log.warning("bucket_cap_mb='tune' was not tried: saved buffers make torch's DDP carry the plan out.")
            return None
        trained = self._layout.replicated.num_bytes
        return BucketTuner(bucket_bytes(self._root, self.plan) / MIB, trained, self.root_device)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._tuner is not None and not self._tuner.done and not self._finding_size:
            size_mb = self._tuner.after_step()
            if size_mb is not None:
                self._use_buckets(size_mb)
        return output

    def _use_buckets(self, size_mb: float) -> None:
        assert self._layout is not None
        assert self._layout.replicated is not None
        self._layout.replicated.resize(int(size_mb * MIB))
        self._layout.plan = dataclasses.replace(self._layout.plan, bucket_cap_mb=size_mb)
