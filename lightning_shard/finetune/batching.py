"""The global batch: the same on any number of devices, cut into the micro-batches that run fastest."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_shard.hardware import Cluster
    from lightning_shard.planner import Decision
    from lightning_shard.specs import ModelSpec, TrainSpec

TIE = 0.05
"""Predicted step times this close, in share, are equal: the model of time is no better."""
ENOUGH_TOKENS = 8192
"""Tokens of a micro-batch beyond which a GPU's matrix products are about as efficient as they get: a planning value."""


def candidates(global_batch_size: int, ranks: int) -> Iterator[int]:
    """Micro-batch sizes that leave no slot of the global batch empty beyond what the number of ranks demands."""
    per_rank = math.ceil(global_batch_size / ranks)
    return (size for size in range(1, per_rank + 1) if per_rank % size == 0)


def choose_micro_batch(
    model: "ModelSpec",
    train: "TrainSpec",
    cluster: "Cluster",
    global_batch_size: int,
    *,
    headroom: float = 0.1,
    pin: dict[str, Any] | None = None,
) -> tuple[int, "Decision"]:
    """The micro-batch with the shortest predicted optimizer step of those that fit, and its decision.

    Sizes are tried in ascending order up to the first that does not fit: a larger one needs more. Of those within
    :data:`TIE` of the fastest it is the smallest that holds :data:`ENOUGH_TOKENS`, else the largest. Where not even one
    sequence fits, that is the answer, and its decision says so. Tensor parallelism is left out unless it is pinned: its
    ranks share one batch.

    Args:
        model: what to train.
        train: its ``micro_batch_size`` and ``accumulate`` are ignored.
        cluster: where.
        global_batch_size: sequences per optimizer step over all devices.
        headroom: share of each device's memory to leave free.
        pin: fields of the Plan that are not to be chosen.
    """
    import dataclasses

    from lightning_shard.planner import choose

    pin = {"tp": 1, **(pin or {})}
    ranks = cluster.world_size // int(pin["tp"])
    fitting: list[tuple[int, Decision]] = []
    for size in candidates(global_batch_size, ranks):
        accumulate = math.ceil(global_batch_size / (ranks * size))
        wish = dataclasses.replace(train, micro_batch_size=size, accumulate=accumulate)
        decision = choose(model, wish, cluster, headroom=headroom, pin=pin)
        if not decision.fits:
            return _best(fitting, train.seq_len) if fitting else (size, decision)
        fitting.append((size, decision))
    return _best(fitting, train.seq_len)


def _best(fitting: list[tuple[int, "Decision"]], seq_len: int) -> tuple[int, "Decision"]:
    fastest_s = min(decision.estimate.step_s for _, decision in fitting)
    near = [one for one in fitting if one[1].estimate.step_s <= fastest_s * (1 + TIE)]
    enough = [one for one in near if one[0] * seq_len >= ENOUGH_TOKENS]
    return enough[0] if enough else near[-1]
