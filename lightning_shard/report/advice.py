"""What a run's figures ask for, in words."""

from collections.abc import Callable

from lightning_shard.planner import expected_step_s
from lightning_shard.report.record import RunRecord

MUCH_WAIT, MUCH_EXPOSED, FAR_OFF, UNEVEN = 0.05, 0.2, 0.25, 1.5


def advice(record: RunRecord) -> list[str]:
    """One line per thing worth a look; none for a run that went as planned."""
    return [line for rule in RULES if (line := rule(record))]


def _data(record: RunRecord) -> str | None:
    share = record.measured.get("data_wait_share")
    if share is None or share < MUCH_WAIT:
        return None
    return f"The host waits for data {share:.0%} of the time: more workers (num_workers), or cheaper preparation of a batch."


def _communication(record: RunRecord) -> str | None:
    share = record.measured.get("exposed_comm_share")
    if share is None or share < MUCH_EXPOSED:
        return None
    return (
        f"{share:.0%} of a step is communication that nothing hides: a larger micro-batch or more accumulation, fewer ranks "
        "per copy (dp_shard), or more resident blocks if memory is left."
    )


def _straggler(record: RunRecord) -> str | None:
    rank = record.measured.get("straggler_rank")
    if rank is None:
        return None
    return f"Rank {rank} needs longer than the others, which wait for it: look at its device's clock, its host and its data."


def _step(record: RunRecord) -> str | None:
    measured, predicted = record.measured.get("step_s"), expected_step_s(record.estimate or {}, record.measured)
    if not measured or not predicted or abs(measured / predicted - 1) < FAR_OFF:
        return None
    return (
        f"A step took {measured / predicted:.2f} times the predicted time: plan the next run with --calibrate and this "
        "run's shard_monitor.json, and measure the links once with lightning-shard probe."
    )


def _uneven(record: RunRecord) -> str | None:
    median, slow = record.measured.get("step_s"), record.measured.get("step_p90_s")
    if not median or not slow or slow < UNEVEN * median:
        return None
    return f"Steps are uneven (90th percentile {slow / median:.1f} times the median): lengths differ, or the machine is shared."


RULES: tuple[Callable[[RunRecord], str | None], ...] = (_data, _communication, _straggler, _step, _uneven)
"""In the order in which they are worth looking at."""
