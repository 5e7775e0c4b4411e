"""The sharded end of the dial."""

import inspect
from typing import Any, Literal

from typing_extensions import override

from lightning_shard._compat import Trainer
from lightning_shard.plans import Plan
from lightning_shard.strategies.base import PlanStrategy
from lightning_shard.strategies.checks import require_no_ddp_options


class FSDP2Strategy(PlanStrategy):
    """``fully_shard`` block by block; ``configure_model`` need not shard anything.

    Args:
        plan: the whole layout; or leave it out and give single fields of it.
        dp_shard: ranks that share one copy (all by default); the rest are replicas (HSDP).
        tp: ranks that share every matrix product, inside a node.
        reshard_after_forward: True, False, or the number of ranks to keep a block sharded over.
        resident_blocks: frozen blocks kept whole on every rank, the last N or these names.
        adapters: what trains is sharded with its block, or whole on every rank ("replicated").
        activation_checkpoint: what is recomputed in backward.
        compile: compile each block with ``torch.compile``.
        offload: "optimizer" keeps the optimizer's state in host memory and updates there; "all" keeps shards and
            gradients there as well, between uses.
        defer_gradient_sync: while accumulating, reduce only at the last micro-batch (holds whole gradients).
        prefetch: blocks gathered ahead of the one that computes.
        lightning: what :class:`PlanStrategy` and Lightning's ``DDPStrategy`` take.
    """

    def __init__(
        self,
        plan: Plan | None = None,
        *,
        dp_shard: int | None = None,
        tp: int = 1,
        reshard_after_forward: bool | int = True,
        resident_blocks: int | tuple[str, ...] = 0,
        adapters: Literal["replicated", "sharded"] = "sharded",
        activation_checkpoint: Literal["none", "selective", "full"] = "none",
        compile: bool = False,
        offload: Literal["none", "optimizer", "all"] = "none",
        defer_gradient_sync: bool = False,
        prefetch: int = 1,
        **lightning: Any,
    ) -> None:
        super().__init__(**lightning)
        require_no_ddp_options("FSDP2Strategy", lightning)
        if plan is not None and not isinstance(plan, Plan):
            raise TypeError(f"plan={plan!r} must be a lightning_shard.Plan, or left out.")
        if dp_shard is not None and dp_shard < 1:
            raise ValueError(f"dp_shard={dp_shard} must be 1 or more: the ranks that share one copy.")
        self._fixed = plan
        self._dp_shard = dp_shard
        self._tp = tp
        self._fields: dict[str, Any] = {
            "reshard_after_forward": reshard_after_forward,
            "resident_blocks": resident_blocks,
            "adapters": adapters,
            "activation_checkpoint": activation_checkpoint,
            "compile": compile,
            "offload": offload,
            "defer_gradient_sync": defer_gradient_sync,
            "prefetch": prefetch,
        }
        self._require_one_source({**self._fields, "dp_shard": dp_shard, "tp": tp})
        Plan(
            dp_shard=dp_shard or _divisible_by(reshard_after_forward), tp=tp, **self._fields
        )  # wrong values are told now

    def _require_one_source(self, fields: dict[str, Any]) -> None:
        """Raise TypeError when a plan and single fields of it are given together."""
        signature = inspect.signature(type(self).__init__).parameters
        given = [name for name, value in fields.items() if value != signature[name].default]
        if self._fixed is not None and given:
            raise TypeError(
                f"Both a plan and {', '.join(given)} were given: the plan says it all. Give one of the two, or "
                "dataclasses.replace(plan, ...)."
            )

    @override
    def fixed_plan(self) -> Plan | None:
        return self._fixed

    @override
    def offload_wish(self) -> str:
        return self._fields["offload"] if self._fixed is None else self._fixed.offload

    @override
    def choose_plan(self, trainer: Trainer) -> Plan:
        if self._fixed is not None:
            return self._fixed
        dp_shard = self._dp_shard or max(1, self.world_size // self._tp)
        if self.world_size % (dp_shard * self._tp):
            raise ValueError(
                f"dp_shard={dp_shard} x tp={self._tp} does not divide the {self.world_size} ranks that were launched: each "
                "copy takes that many. Use a divisor, or launch a multiple."
            )
        fields = dict(self._fields)
        if dp_shard == 1:  # nothing is sharded, so nothing is resharded
            fields["reshard_after_forward"] = True
        return Plan(dp_replicate=self.world_size // (dp_shard * self._tp), dp_shard=dp_shard, tp=self._tp, **fields)

    @override
    def wishes(self) -> dict[str, str]:
        if self._fixed is not None:
            return super().wishes()
        fields = {"dp_shard": self._dp_shard, "tp": self._tp, **self._fields}
        return {**super().wishes(), **{name: repr(value) for name, value in fields.items()}}


def _divisible_by(reshard: bool | int) -> int:
    """A number of shards with which ``reshard_after_forward`` is in order, before the real one is known."""
    return reshard if isinstance(reshard, int) and not isinstance(reshard, bool) and reshard > 0 else 1
