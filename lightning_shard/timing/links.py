"""Seconds of a collective over the links its ranks lie on: hops x latency + (n-1)/n x bytes / bandwidth."""

import math
from dataclasses import dataclass

from lightning_shard.hardware import Cluster, Link


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """The ranks of one collective: how many on each node, over how many nodes."""

    per_node: int
    nodes: int

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.per_node * self.nodes


def ring_of(cluster: Cluster, size: int, stride: int) -> Ring:
    """The ranks of a group of ``size`` whose neighbours are ``stride`` ranks apart."""
    per_node = min(size, max(1, cluster.devices_per_node // stride))
    return Ring(per_node=per_node, nodes=math.ceil(size / per_node))


def collective_s(cluster: Cluster, ring: Ring, size_bytes: float, *, messages: int) -> float:
    """Seconds of all-gathers or reduce-scatters that move ``size_bytes`` in all, in so many messages.

    Each goes around the ring hop by hop, over every rank of it: NCCL's algorithm for them (nccl src/graph/tuning.cc
    counts as many steps), so their latency grows with the ranks. See :func:`all_reduce_s` for the other kind.
    """
    hops_s = (ring.size - ring.nodes) * cluster.intra_link.latency_s
    if ring.nodes > 1:
        hops_s += ring.nodes * cluster.inter_link.latency_s
    reached = _link(cluster, ring).all_gather_share
    return _messages_s(cluster, ring, size_bytes / reached, messages * hops_s)


def all_reduce_s(cluster: Cluster, ring: Ring, size_bytes: float, *, messages: int) -> float:
    """Seconds of all-reduces: twice the bytes, and between nodes a tree's hops, which NCCL takes where it is faster."""
    hops_s = (ring.per_node - 1) * cluster.intra_link.latency_s
    if ring.nodes > 1:
        hops_s += math.ceil(math.log2(ring.nodes)) * cluster.inter_link.latency_s
    reached = _link(cluster, ring).all_reduce_share
    return 2 * _messages_s(cluster, ring, size_bytes / reached, messages * hops_s)


def _messages_s(cluster: Cluster, ring: Ring, size_bytes: float, hops_s: float) -> float:
    if ring.size == 1:
        return 0.0
    return hops_s + (ring.size - 1) / ring.size * size_bytes / bandwidth(cluster, ring)


def _link(cluster: Cluster, ring: Ring) -> Link:
    """The slowest kind of link that a group crosses."""
    return cluster.intra_link if ring.nodes == 1 else cluster.inter_link


def bandwidth(cluster: Cluster, ring: Ring) -> float:
    """Bus bandwidth of a group: the in-node link, or its share of the node's network where that is less."""
    if ring.nodes == 1:
        return cluster.intra_link.bytes_per_s
    link = cluster.inter_link
    node = link.bytes_per_s * (1 if link.shared_by_node else cluster.devices_per_node)
    share = node * ring.per_node / cluster.devices_per_node
    return min(share, cluster.intra_link.bytes_per_s) if ring.per_node > 1 else share
