"""Bytes a plan moves over each link in one optimizer step: inside the node, and out of it."""

from dataclasses import dataclass

from lightning_shard.memory import Situation
from lightning_shard.timing import KINDS, Ring, Traffic, ring_of, tensor_gathers, tensor_sums


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkBytes:
    """What collectives send in one optimizer step, as rings would."""

    intra_bytes: float
    """Per device, to its neighbours in the node."""
    inter_bytes: float
    """Per node, to other nodes, over all of its adapters."""

    def __add__(self, other: "LinkBytes") -> "LinkBytes":
        return LinkBytes(
            intra_bytes=self.intra_bytes + other.intra_bytes, inter_bytes=self.inter_bytes + other.inter_bytes
        )


def link_bytes(s: Situation) -> LinkBytes:
    """Bytes over each link, of the collectives that :func:`lightning_shard.timing.time_step` times.

    A ring of n ranks passes (n-1)/n of the whole side once around for an all-gather or a reduce-scatter and twice for
    an all-reduce. A ring that spans nodes leaves each of them once, and a node has as many rings as devices for each
    of the ring's.
    """
    plan = s.plan
    if not s.sharded:
        return _around(s, ring_of(s.cluster, plan.dp_replicate, 1), 2 * s.master_bytes * s.total("trained_numel"))
    rounds = s.train.accumulate
    keeps = plan.reshard_after_forward is False
    gathers, reductions = 1 if keeps else rounds, 1 if plan.defer_gradient_sync else rounds
    gathered = Traffic.of(s, KINDS, lambda group: group.gathered_bytes).num_bytes
    again = Traffic.of(s, ("block",), lambda group: 0 if keeps or group.resident else group.gathered_bytes).num_bytes
    reduced = Traffic.of(s, KINDS, lambda group: s.reduce_bytes * group.whole_numel).num_bytes
    inside = _around(s, ring_of(s.cluster, plan.dp_shard, plan.tp), gathers * (gathered + again) + reductions * reduced)
    across = _around(s, ring_of(s.cluster, plan.dp_replicate, plan.dp_shard * plan.tp), 2 * reduced / plan.dp_shard)
    flat = _around(s, ring_of(s.cluster, plan.data_parallel_size, 1), 2 * s.master_bytes * s.total("flat_numel"))
    layers = _around(
        s, ring_of(s.cluster, plan.tp, 1), rounds * (2 * tensor_sums(s).num_bytes + tensor_gathers(s).num_bytes)
    )
    return inside + across + flat + layers


def _around(s: Situation, ring: Ring, num_bytes: float) -> LinkBytes:
    """``num_bytes`` passed once around a ring, and around its like on the same nodes."""
    if ring.size == 1:
        return LinkBytes(intra_bytes=0.0, inter_bytes=0.0)
    sent = (ring.size - 1) / ring.size * num_bytes
    rings = s.cluster.devices_per_node / ring.per_node
    return LinkBytes(
        intra_bytes=sent if ring.per_node > 1 else 0.0, inter_bytes=rings * sent if ring.nodes > 1 else 0.0
    )
