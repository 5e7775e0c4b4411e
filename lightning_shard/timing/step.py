"""The terms of a step: compute, collectives that hide behind it and those that do not, the update.

Compute is FLOPs over peak and efficiency; an all-reduce is twice a gather or reduction of its bytes; data-parallel
collectives hide behind compute on accelerators and do not inside a host, where each one of shards also costs work of its
own (between hosts they do in part: :mod:`lightning_shard.timing.network`); tensor-parallel sums never hide.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from lightning_shard.activations.block import num_tokens
from lightning_shard.hardware import Cluster
from lightning_shard.memory import Situation
from lightning_shard.memory.groups import Group
from lightning_shard.plans import tuned_bucket_bytes
from lightning_shard.specs import TensorSpec
from lightning_shard.specs.split import full_name, split_vocabulary
from lightning_shard.timing.adapters import BACKWARD, adapter_s
from lightning_shard.timing.links import Ring, all_reduce_s, collective_s, ring_of
from lightning_shard.timing.network import passes_s
from lightning_shard.timing.tensor_parallel import tensor_gathers, tensor_sums

ATTENTION_BACKWARD = 2.5
"""Backward of fused attention against its forward: it recomputes the scores (FlashAttention paper, 2.5x)."""
UPDATE_BYTES_PER_ELEMENT = 28
"""An AdamW step reads and writes weight and two moments and reads the gradient, 4 bytes each."""


HOST_BUS_BYTES_PER_S = 20e9
"""Between host and device: PCI Express 4.0 x16 as copies reach it."""
HOST_BYTES_PER_S = 100e9
"""Memory bandwidth of a server's socket that one process can use: a planning value."""
KINDS = ("block", "embedding", "head", "root")
"""Groups that are gathered and reduced."""
FLAT_CHUNK_BYTES = 4 * 2**20
"""Gradients outside the shard groups travel in chunks of this size (parallelize.flat)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """One optimizer step of one plan."""

    step_s: float
    compute_s: float
    comm_s: float
    exposed_s: float
    """Communication that nothing hides."""
    shard_comm_s: float
    """Part of ``comm_s`` that is gathers and reductions of shards, block by block, hidden or not."""
    comm_bytes: int
    flops: float
    """The model's own FLOPs per device, recomputation not counted."""


def time_step(s: Situation) -> StepTime:
    """The time of one optimizer step."""
    forward, backward = compute_flops(s)
    again = forward * _recomputed_share(s)
    speed = s.cluster.device.flops_of(_compute_dtype(s)) * s.cluster.device.efficiency
    beside_s = adapter_s(s)
    forward_s = forward / speed + beside_s
    backward_s = (backward + again) / speed + (BACKWARD + _recomputed_share(s)) * beside_s
    trained = s.total("trained_numel") + s.total("flat_numel")
    update_s = 0.0 if s.updates_on_host else UPDATE_BYTES_PER_ELEMENT * trained / s.cluster.device.memory_bytes_per_s
    step_s, comm_s, shard_comm_s, comm_bytes = (_sharded if s.sharded else _replicated)(s, forward_s, backward_s)
    compute_s = s.train.accumulate * (forward_s + backward_s)
    sums_s, sums_bytes = _tensor_parallel(s)
    step_s += _offload_s(s) + sums_s
    return StepTime(
        step_s=step_s + update_s,
        compute_s=compute_s,
        comm_s=comm_s + sums_s,
        exposed_s=max(0.0, step_s - compute_s),
        shard_comm_s=shard_comm_s,
        comm_bytes=int(comm_bytes + sums_bytes),
        flops=s.train.accumulate * sum(compute_flops(s, own=True)),
    )


def _offload_s(s: Situation) -> float:
    """Copies over the host's bus: shards to the device for forward and backward, gradients and new weights back.

    Counted in full: how much of it hides is not known. The update itself runs at the host's memory speed. Where only
    the update is there, weights and gradients go and new weights come, once a step.
    """
    if not s.updates_on_host:
        return 0.0
    trained = s.total("trained_numel") + s.total("flat_numel")
    copied = 3 * s.master_bytes * trained
    if s.offloaded:
        shards = s.total("frozen_bytes") + s.total("trained_bytes")
        copied = s.train.accumulate * (2 * shards + s.master_bytes * s.total("trained_numel"))
    return copied / HOST_BUS_BYTES_PER_S + UPDATE_BYTES_PER_ELEMENT * trained / HOST_BYTES_PER_S


def _tensor_parallel(s: Situation) -> tuple[float, float]:
    """Seconds and bytes sent of sums and joined logits. The next product waits for each, so nothing hides them."""
    if s.plan.tp == 1:
        return 0.0, 0.0
    ring, sums, gathers = ring_of(s.cluster, s.plan.tp, 1), tensor_sums(s), tensor_gathers(s)
    rounds, share = s.train.accumulate, _sum_share(s.plan.tp)
    seconds = all_reduce_s(s.cluster, ring, sums.num_bytes, messages=sums.messages)
    seconds += collective_s(s.cluster, ring, gathers.num_bytes, messages=gathers.messages)
    return rounds * seconds, rounds * share * (sums.num_bytes + gathers.num_bytes / 2)


def compute_flops(s: Situation, *, own: bool = False) -> tuple[float, float]:
    """Forward and backward FLOPs of one micro-batch: 2 per weight and token forward, 2 for the input's gradient,
    2 more for the weight's where it trains (6 PT in full, 4 PT with adapters); attention on top.

    ``own`` counts what tensor-parallel ranks all compute (the last norm, a head that is not split) once for all of them.
    """
    tokens = num_tokens(s.model, s.train)
    used = trained = 0.0
    split = split_vocabulary(s.model, s.plan.tp)
    for group in s.groups:
        if group.unit.kind == "embedding" and not s.model.tied:
            continue
        for tensor in group.unit.tensors:
            active = group.count * tensor.numel * _active_share(s, tensor)
            whole = group.kind != "block" and full_name(group.unit, tensor) not in split
            active /= s.plan.tp if own and whole else 1
            used += active
            trained += active if tensor.trainable else 0.0
    scores = _attention_flops(s)
    return 2 * used * tokens + scores, 2 * (used + trained) * tokens + ATTENTION_BACKWARD * scores


def _active_share(s: Situation, tensor: TensorSpec) -> float:
    """Share of a tensor that one token meets: a mixture's token meets a few of its experts."""
    arch = s.model.architecture
    if arch is not None and arch.experts and "experts" in tensor.name and "shared" not in tensor.name:
        return arch.experts_per_token / arch.experts
    return 1.0


def _attention_flops(s: Situation) -> float:
    """Two products of every pair of positions per head; half of the pairs under a causal mask."""
    arch = s.model.architecture
    if arch is None:
        return 0.0
    length = min(arch.tokens_per_sample or s.train.seq_len, arch.sliding_window or s.train.seq_len)
    pairs = num_tokens(s.model, s.train) * length * (0.5 if arch.kind == "causal-lm" else 1.0)
    return 4.0 * s.model.num_blocks * arch.heads * arch.head_dim * pairs


def _compute_dtype(s: Situation) -> str:
    return s.train.precision_row.compute_dtype or s.train.precision_row.master_dtype


def _recomputed_share(s: Situation) -> float:
    """Share of the forward pass that is run again: of the selective policy about half."""
    blocks = s.model.num_blocks
    share = sum(block.recomputing for block in s.blocks) / blocks if blocks else 0.0
    return share * (0.5 if s.plan.activation_checkpoint == "selective" else 1.0)


Laid = tuple[float, float, float, float]
"""Seconds of forward and backward with their collectives, of all collectives, of those of shards; bytes sent."""


def _replicated(s: Situation, forward_s: float, backward_s: float) -> Laid:
    """Forward, then backward beside the all-reduces, whose last bucket nothing hides."""
    compute_s = s.train.accumulate * (forward_s + backward_s)
    if s.plan.dp_replicate == 1:
        return compute_s, 0.0, 0.0, 0.0
    size = s.master_bytes * s.total("trained_numel")
    wanted = s.plan.bucket_cap_mb
    bucket = tuned_bucket_bytes(size, s.plan.world_size) if wanted is None else int(wanted * 2**20)
    num_buckets = max(1, math.ceil(size / bucket))
    ring = ring_of(s.cluster, s.plan.dp_replicate, 1)
    comm_s = all_reduce_s(s.cluster, ring, size, messages=num_buckets)
    sent = 2 * size * (ring.size - 1) / ring.size
    if s.cluster.accelerator == "cpu":
        return compute_s + comm_s, comm_s, 0.0, sent
    last_s = comm_s / num_buckets
    return compute_s + max(0.0, comm_s - last_s - backward_s) + last_s, comm_s, 0.0, sent


def _sharded(s: Situation, forward_s: float, backward_s: float) -> Laid:
    """Gathers beside forward, gathers and reductions beside backward; the first gather and the last reduction
    stand alone. Blocks that are kept are gathered once a step; deferred reductions come once a step.
    """
    ring, rounds = ring_of(s.cluster, s.plan.dp_shard, s.plan.tp), s.train.accumulate
    keeps = s.plan.reshard_after_forward is False
    gathers, reductions = 1 if keeps else rounds, 1 if s.plan.defer_gradient_sync else rounds
    forward = Traffic.of(s, KINDS, lambda group: group.gathered_bytes)
    again = Traffic.of(s, ("block",), lambda group: 0 if keeps or group.resident else group.gathered_bytes)
    reduced = Traffic.of(s, KINDS, lambda g: s.reduce_bytes * g.whole_numel)
    gather_s, again_s = forward.seconds(s.cluster, ring), again.seconds(s.cluster, ring)
    reduce_s = reduced.seconds(s.cluster, ring, gloo_reduces=s.cluster.accelerator == "cpu" and ring.size > 2)
    flat_bytes = s.master_bytes * s.total("flat_numel")
    once_s = _across_replicas(s, reduced.num_bytes // s.plan.dp_shard) + _flat(s, flat_bytes)
    messages = gathers * (forward.messages + again.messages) + reductions * reduced.messages
    shards_s = gathers * (gather_s + again_s) + reductions * reduce_s
    shards_s += messages * s.cluster.device.host_work_s * (ring.size > 1)
    comm_s = shards_s + once_s
    share = (ring.size - 1) / ring.size
    sent = share * (gathers * (forward.num_bytes + again.num_bytes) + reductions * reduced.num_bytes)
    sent += _sum_share(s.plan.dp_replicate) * reduced.num_bytes / s.plan.dp_shard
    sent += _sum_share(s.plan.data_parallel_size) * flat_bytes
    compute_s = rounds * (forward_s + backward_s)
    if s.cluster.accelerator == "cpu":
        together_s = compute_s + shards_s if ring.nodes == 1 else passes_s(s, ring, forward_s, backward_s)
        return together_s + once_s, comm_s, shards_s, sent
    hidden = gathers * max(forward_s, gather_s) + (rounds - gathers) * forward_s
    beside = gathers * again_s + reductions * reduce_s + once_s
    hidden += max(rounds * backward_s, beside)
    ends_s = gather_s / max(1, forward.messages) + reduce_s / max(1, reduced.messages)
    return hidden + ends_s, comm_s, shards_s, sent


def _sum_share(ranks: int) -> float:
    """Bytes each of so many ranks sends in an all-reduce, in units of what is summed."""
    return 2 * (ranks - 1) / ranks


@dataclass(frozen=True, slots=True)
class Traffic:
    """Collectives of one kind in one micro-batch: bytes of the whole side, and how many."""

    num_bytes: int
    messages: int

    @classmethod
    def of(cls, s: Situation, kinds: tuple[str, ...], size: Callable[[Group], int]) -> "Traffic":
        groups = [group for group in s.groups if group.kind in kinds and size(group)]
        return cls(sum(g.count * size(g) for g in groups), sum(g.count for g in groups))

    def seconds(self, cluster: Cluster, ring: Ring, *, gloo_reduces: bool = False) -> float:
        """How long they take; among more than two, gloo scatters sums by an all-reduce, of which each rank keeps a part."""
        one_s = all_reduce_s if gloo_reduces else collective_s
        return one_s(cluster, ring, self.num_bytes, messages=self.messages) if self.num_bytes else 0.0


def _flat(s: Situation, num_bytes: int) -> float:
    """All-reduces of the gradients outside the groups, over all ranks, in chunks."""
    if not num_bytes:
        return 0.0
    ring = ring_of(s.cluster, s.plan.data_parallel_size, 1)
    return all_reduce_s(s.cluster, ring, num_bytes, messages=math.ceil(num_bytes / FLAT_CHUNK_BYTES))


def _across_replicas(s: Situation, shard_bytes: int) -> float:
    """All-reduce of the sharded gradients over replicas (HSDP)."""
    if s.plan.dp_replicate == 1 or not shard_bytes:
        return 0.0
    ring = ring_of(s.cluster, s.plan.dp_replicate, s.plan.dp_shard * s.plan.tp)
    return all_reduce_s(s.cluster, ring, shard_bytes, messages=s.model.num_blocks)
