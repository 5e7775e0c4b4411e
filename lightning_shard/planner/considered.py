"""One plan with its estimate, and what a device must have for it."""

import dataclasses
from dataclasses import dataclass

from lightning_shard.hardware import Cluster
from lightning_shard.memory import Estimate, Moment, measure
from lightning_shard.memory.situation import Situation, make_situation
from lightning_shard.memory.slack import OPEN_SEGMENTS_BYTES
from lightning_shard.plans import Plan
from lightning_shard.specs import ModelSpec, TrainSpec
from lightning_shard.timing import time_step

GIVEN_BACK = (
    "seconds that the allocator loses when it gives free blocks back and tries again, without which this does not fit"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Considered:
    """A plan and what it needs."""

    plan: Plan
    estimate: Estimate

    @property
    def needs_bytes(self) -> int:
        """What a device must have: for the step, for loading before it, and for resuming."""
        beside = self.estimate.load_device_bytes - self.estimate.load_peak_bytes
        return max(
            self.estimate.device_bytes, self.estimate.load_device_bytes, self.estimate.resume_peak_bytes + beside
        )

    def given_back(self, limit_bytes: int) -> "Considered":
        """The plan where its update is the fullest moment, on a device that has no room for all that the allocator
        would hold then: it gives free blocks back and tries again (c10/cuda/CUDACachingAllocator,
        ``release_cached_blocks``). Of what forward and backward made nothing lives by then, so those blocks go back whole;
        earlier in a step they are cut up by what does. The plan as it is where that is not so, not needed, or not enough.
        """
        over, slack = self.estimate.device_bytes - limit_bytes, self.estimate.terms.get("allocator_slack", 0)
        others = dataclasses.replace(self, estimate=dataclasses.replace(self.estimate, device_bytes=0)).needs_bytes
        at_update = self.estimate.peak_at == Moment.OPTIMIZER.value
        if not at_update or not 0 < over <= slack - OPEN_SEGMENTS_BYTES or others > limit_bytes:
            return self
        smaller = dataclasses.replace(
            self.estimate,
            device_bytes=limit_bytes,
            reserved_bytes=self.estimate.reserved_bytes - over,
            terms={**self.estimate.terms, "allocator_slack": slack - over},
            not_modelled=(*self.estimate.not_modelled, GIVEN_BACK),
        )
        return Considered(plan=self.plan, estimate=smaller)

    @property
    def share_s(self) -> float:
        """Seconds per micro-batch of all ranks: plans whose steps see different numbers of them compare by this."""
        return self.estimate.step_s / self.plan.data_parallel_size


def inject(model: ModelSpec, train: TrainSpec) -> ModelSpec:
    """The model with the adapter that the training wants, unless it is there already."""
    return model if train.adapter is None or model.adapter is not None else model.with_adapter(train.adapter)


def weigh(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: Cluster) -> Considered:
    """A plan with its estimate."""
    return Considered(plan=plan, estimate=estimate(model, train, plan, cluster))


def estimate(model: ModelSpec, train: TrainSpec, plan: Plan, cluster: Cluster) -> Estimate:
    """Memory and time of one plan."""
    return _timed(make_situation(model, train, plan, cluster))


def _timed(situation: Situation) -> Estimate:
    memory, time = measure(situation), time_step(situation)
    tokens = situation.train.tokens * situation.train.accumulate * situation.plan.data_parallel_size
    peak = situation.cluster.device.flops_of(situation.train.precision_row.compute_dtype or "float32")
    step_s = time.step_s or float("inf")
    return dataclasses.replace(
        memory,
        step_s=time.step_s,
        compute_s=time.compute_s,
        comm_s=time.comm_s,
        shard_comm_s=time.shard_comm_s,
        comm_bytes=time.comm_bytes,
        comm_share=time.exposed_s / step_s,
        tokens_per_s=tokens / step_s,
        mfu=time.flops / step_s / peak,
    )
