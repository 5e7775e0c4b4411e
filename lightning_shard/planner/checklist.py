"""The questions a careful engineer asks of a distributed training plan, answered with this plan's figures."""

import math
from dataclasses import dataclass

from lightning_shard.memory import Estimate
from lightning_shard.memory.situation import Situation
from lightning_shard.plans import MIB, tuned_bucket_bytes
from lightning_shard.specs import format_bytes
from lightning_shard.specs.split import splits_head, vocabulary_rows, why_not_split
from lightning_shard.timing.links import bandwidth, ring_of
from lightning_shard.traffic import link_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One question of the checklist, answered for a plan."""

    topic: str
    answer: str

    def to_dict(self) -> dict[str, str]:
        """All fields as plain JSON values."""
        return {"topic": self.topic, "answer": self.answer}


def checklist(s: Situation, estimate: Estimate, limit_bytes: int) -> tuple[Answer, ...]:
    """Bucket size, bucket views, wrap granularity, precision, traffic against bandwidth, and tensor parallelism."""
    answers = {
        "bucket size": _bucket_size(s),
        "bucket views": _bucket_views(s),
        "wrap granularity": _wrapping(s),
        "mixed precision": _precision(s),
        "network traffic": _traffic(s, estimate),
        "tensor parallel": _tensor_parallel(s, limit_bytes),
    }
    return tuple(Answer(topic=topic, answer=answer) for topic, answer in answers.items())


def _bucket_size(s: Situation) -> str:
    if s.sharded:
        block = s.reduce_bytes * s.one("whole_numel", "block")
        return f"does not apply: gradients are reduced group by group, {format_bytes(block)} for a block"
    if s.plan.dp_replicate == 1:
        return "does not apply: one rank reduces nothing"
    size, cap = s.master_bytes * s.total("trained_numel"), s.plan.bucket_cap_mb
    bucket = tuned_bucket_bytes(size, s.plan.world_size) if cap is None else int(cap * MIB)
    count = math.ceil(size / bucket)
    return (
        f"{format_bytes(min(bucket, size))} of {format_bytes(size)} of gradients, {count} all-reduce{'s' * (count > 1)} a step: "
        + ("all but the last beside backward" if count > 1 else "one, after backward")
    )


def _bucket_views(s: Situation) -> str:
    if not s.buckets:
        return "does not apply: there are no buckets"
    return "yes: gradients are views of the buffers that are reduced, nothing is copied"


def _wrapping(s: Situation) -> str:
    if not s.sharded:
        return "does not apply: every rank holds the whole model"
    blocks = s.model.num_blocks
    if not blocks:
        whole = format_bytes(max(group.gathered_bytes for group in s.groups))
        return f"one group of {whole}: no repeated blocks were found, so sharding saves little"
    alone = [kind for kind in ("embedding", "head") if s.total("gathered_bytes", kind)]
    rest = f", {' and '.join(alone)} alone, the rest at the root" if alone else ", the rest at the root"
    return f"{blocks} blocks of up to {format_bytes(s.one('gathered_bytes', 'block'))}, one gathered ahead{rest}"


def _precision(s: Situation) -> str:
    row = s.train.precision_row
    master = row.master_dtype
    compute = row.compute_dtype or "the stored type"
    where = "the sharding policy casts what it gathers" if s.sharded else "weights are cast where they are used"
    kept = f"what trains is kept, updated and reduced in {master}"
    return f"{kept}, products run in {compute}: {where}" if s.casts else f"{kept}, products run in it"


def _traffic(s: Situation, estimate: Estimate) -> str:
    if s.plan.world_size == 1:
        return "none: one device"
    moved, cluster = link_bytes(s), s.cluster
    parts = []
    if moved.intra_bytes:
        inside = cluster.intra_link
        parts.append(
            f"{format_bytes(int(moved.intra_bytes))} per device over {inside.name} "
            f"({_seconds(moved.intra_bytes / inside.bytes_per_s)} at {inside.bytes_per_s / 1e9:g} GB/s)"
        )
    if moved.inter_bytes:
        between = cluster.inter_link
        node = bandwidth(cluster, ring_of(cluster, cluster.world_size, 1)) if cluster.devices_per_node == 1 else None
        node = node or between.bytes_per_s * (1 if between.shared_by_node else cluster.devices_per_node)
        parts.append(
            f"{format_bytes(int(moved.inter_bytes))} per node over {between.name} "
            f"({_seconds(moved.inter_bytes / node)} at {node / 1e9:g} GB/s)"
        )
    trained = s.master_bytes * (s.total("whole_numel") or s.total("trained_numel"))
    times = f", {estimate.comm_bytes / trained:.1f} times the gradients" if trained else ""
    return f"{' and '.join(parts)}{times}; ranks wait for {estimate.comm_share:.0%} of the step"


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"


def _vocabulary(s: Situation) -> str:
    tp, num_rows = s.plan.tp, vocabulary_rows(s.model)
    if not s.splits_embedding:
        return f" and all of the vocabulary ({tp} does not divide its {num_rows} rows: pad them)" if num_rows else ""
    return f" and 1/{tp} of the vocabulary{'' if splits_head(s.model, tp) else ' (of the embedding, not of the head)'}"


def _tensor_parallel(s: Situation, limit_bytes: int) -> str:
    if s.plan.tp > 1:
        return (
            f"yes, over {s.plan.tp} ranks of a node: each holds {format_bytes(s.one('gathered_bytes', 'block'))} of a block"
            f"{_vocabulary(s)}, and sums activations over the in-node link"
        )
    refusal = why_not_split(s.model, 2)
    if refusal is not None:
        return f"not to be had: {refusal}"
    block = max(group.stored_bytes for group in s.groups if group.kind == "block" or not s.model.num_blocks)
    return f"not needed: a whole block takes {format_bytes(block)} of {format_bytes(limit_bytes)} usable"
