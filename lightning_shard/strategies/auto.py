"""The strategy that decides: it plans from the real module, the real batch and the real devices."""

import json
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard._compat import Trainer
from lightning_shard.hardware import Cluster, LinkProfile
from lightning_shard.memory import Estimate
from lightning_shard.planner import Decision, choose
from lightning_shard.plans import Plan
from lightning_shard.simulate import simulate_in_subprocess
from lightning_shard.simulate.confirm import confirm
from lightning_shard.specs import ModelSpec, TrainSpec, format_bytes
from lightning_shard.strategies.auto_oom import explain_on, guard
from lightning_shard.strategies.base import PlanStrategy
from lightning_shard.strategies.facts import describe_cluster, describe_training, free_device_memory, largest_batch
from lightning_shard.strategies.oom import OomLadder


class AutoShardStrategy(PlanStrategy):
    """Plans at setup and runs the fastest layout that fits.

    Rank 0 decides from the smallest device of all ranks and tells the others. What was decided, and why,
    is in :attr:`plan`, :attr:`estimate` and :attr:`decision` once the run is set up.

    Args:
        headroom: share of each device's memory to leave free.
        plan: run this plan instead of deciding.
        pin: fields of the Plan that the decision must keep, such as ``{"dp_shard": 8}``.
        cluster: what to plan for; detected by default.
        train: batch, length and optimizer to plan for; read from the run by default.
        device_memory: bytes that one process may use; measured by default.
        links: links as ``lightning-shard probe`` measured them, or the file it wrote.
        on_oom: "replan": when a rank runs out of memory in the first steps, all ranks take the next plan that needs less
            and do the step again. "error": the error says what the plan needs, term by term, and what would help.
        simulate: check the chosen plan by running this module's own step without memory, in another process.
        lightning: anything that Lightning's ``DDPStrategy`` takes.
    """

    def __init__(
        self,
        *,
        headroom: float = 0.1,
        plan: Plan | None = None,
        pin: dict[str, Any] | None = None,
        cluster: Cluster | None = None,
        train: TrainSpec | None = None,
        device_memory: int | None = None,
        links: LinkProfile | str | None = None,
        simulate: bool = False,
        on_oom: Literal["error", "replan"] = "error",
        **lightning: Any,
    ) -> None:
        super().__init__(**lightning)
        if not 0 <= headroom < 1:
            raise ValueError(f"headroom={headroom} is a share of the device's memory: give 0 or more and less than 1.")
        if device_memory is not None and (not isinstance(device_memory, int) or device_memory <= 0):
            raise ValueError(f"device_memory={device_memory!r} is a number of bytes: give 1 or more, or leave it out.")
        self._headroom = headroom
        self._fixed = plan
        self._pin = dict(pin or {})
        self._cluster = cluster
        self._train = train
        self._device_memory = device_memory
        self._links = LinkProfile.load(links) if isinstance(links, str) else links
        self._simulate = simulate
        if on_oom not in ("error", "replan"):
            raise ValueError(f'on_oom={on_oom!r} must be "error" or "replan".')
        self._on_oom = on_oom
        self._ladder: OomLadder | None = None
        self._decision: Decision | None = None
        self._planned_for: TrainSpec | None = None

    @property
    def decision(self) -> Decision | None:
        """The plan with every rejected one and the number that rejected it; None for a plan that was given."""
        return self._decision

    @property
    def estimate(self) -> Estimate | None:
        """Predicted bytes and seconds of the plan in force."""
        return None if self._decision is None else self._decision.estimate

    @property
    def headroom(self) -> float:
        """Share of each device's memory to leave free."""
        return self._headroom

    @property
    def pin(self) -> dict[str, Any]:
        """Fields of the Plan that are not to be chosen."""
        return dict(self._pin)

    def cluster(self) -> Cluster:
        """What is planned for, with the smallest device's memory. Collective: every rank calls it."""
        return self._describe(self._smallest_device())

    @override
    def fixed_plan(self) -> Plan | None:
        return self._fixed

    @override
    def offload_wish(self) -> str:
        return str(self._pin.get("offload", "none")) if self._fixed is None else self._fixed.offload

    @override
    def wishes(self) -> dict[str, str]:
        return {**super().wishes(), "headroom": repr(self._headroom), "pin": json.dumps(self._pin, sort_keys=True)}

    @override
    def choose_plan(self, trainer: Trainer) -> Plan:
        if self._fixed is not None:
            return self._fixed
        memory = self._smallest_device()
        train = self._planned_for = self._train or describe_training(
            trainer, self._root, self._shard_precision.meaning.name
        )
        self._decision = self._decide(trainer, train, memory)
        return self._decision.plan

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        if self._on_oom == "replan" and not self._finding_size and self._decision is not None:
            self._ladder = guard(self)

    @override
    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        if self._ladder is None or not self._ladder.active:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        result = super().optimizer_step(optimizer, self._ladder.voting(optimizer, closure), model, **kwargs)
        self._ladder.updated()
        return result

    @override
    def on_exception(self, exception: BaseException) -> None:
        if isinstance(exception, torch.OutOfMemoryError) and self._decision is not None:
            explain_on(exception, self)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        if self._ladder is not None:
            self._ladder.close()
        super().teardown()

    def _smallest_device(self) -> int:
        memory = self._device_memory or free_device_memory(self.root_device, self.num_processes)
        if not dist.is_initialized():
            return memory
        smallest = torch.tensor(memory, dtype=torch.int64, device=self.root_device)
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
        return int(smallest.item())

    def _decide(self, trainer: Trainer, train: TrainSpec, memory: int) -> Decision:
        """One answer for all ranks, or one error on all ranks."""
        answer: Decision | Exception | None = None
        if self.is_global_zero:
            try:
                model = ModelSpec.from_module(self._root)
                pin = {**self._pin, "torch_ddp": True} if self._needs_torch_ddp() else self._pin
                decision = choose(model, train, self._describe(memory), headroom=self._headroom, pin=pin)
                if self._simulate:
                    batch = largest_batch(trainer, self._root)
                    simulation = simulate_in_subprocess(self._root, train, decision.plan, batch=batch)
                    decision = confirm(decision, simulation)
                answer = decision
            except Exception as error:
                answer = error
        answer = self.broadcast(answer)
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return self._require_fit(answer)

    def _describe(self, memory: int) -> Cluster:
        nodes, local = self.num_nodes, self.num_processes
        cluster = self._cluster or describe_cluster(self.root_device, nodes, local, memory)
        return cluster if self._links is None else self._links.apply(cluster)

    def _require_fit(self, decision: Decision) -> Decision:
        if not decision.fits:
            advice = "; ".join(decision.advice) or "none of the usual remedies is enough"
            raise RuntimeError(
                f"No plan fits: {decision.reason}. It lacks {format_bytes(decision.shortfall_bytes)} per device "
                f"({format_bytes(decision.estimate.device_bytes)} needed, {format_bytes(decision.limit_bytes)} usable). "
                f"What would help: {advice}."
            )
        return decision
