"""One line: predicted against measured."""

from collections.abc import Callable, Mapping
from typing import Any

from lightning_shard.planner import expected_step_s
from lightning_shard.specs import format_bytes

ABOUT_FULL = 0.05
"""Batches whose share of the planned positions is this close to one are as planned."""


def summarize(measured: Mapping[str, Any], estimate: Mapping[str, Any]) -> str:
    """Step time, throughput, communication and memory, each with what was predicted where it was.

    Where the run's batches are shorter than the longest, which the plan is for, the step time is what was predicted for
    those; tokens per second stay the plan's.
    """
    estimate = {**estimate, "expected_step_s": expected_step_s(estimate, measured)}
    fill = measured.get("batch_fill")
    full = fill is None or abs(fill - 1) < ABOUT_FULL
    rows: tuple[tuple[str, str, str, Callable[[float], str]], ...] = (
        ("step", "step_s", "expected_step_s", lambda s: f"{s * 1e3:,.0f} ms"),
        ("tokens/s", "tokens_per_s", "tokens_per_s", lambda n: f"{n:,.0f}"),
        ("MFU", "mfu", "mfu", lambda share: f"{share:.0%}"),
        ("waiting for communication", "exposed_comm_share", "comm_share", lambda share: f"{share:.0%}"),
        ("waiting for data", "data_wait_share", "", lambda share: f"{share:.0%}"),
        ("allocated", "allocated_bytes", "allocated_bytes", lambda size: format_bytes(int(size))),
        ("reserved", "reserved_bytes", "reserved_bytes", lambda size: format_bytes(int(size))),
    )
    parts = [
        _compare(name, measured[key], estimate.get(other), show)
        for name, key, other, show in rows
        if measured.get(key) is not None
    ]
    if not full and measured.get("step_s"):
        parts.insert(1, f"batches {fill:.0%} as full as planned for")
    rank = measured.get("straggler_rank")
    if rank is not None:
        parts.append(f"rank {rank} holds the others up")
    return ", ".join(parts) or "no step measured yet"


def _compare(name: str, measured: float, predicted: float | None, show: Callable[[float], str]) -> str:
    if not predicted:
        return f"{name} {show(measured)}"
    if name.startswith(("MFU", "waiting")):  # shares: a relative difference of a small one says nothing
        return f"{name} {show(measured)} ({show(predicted)} predicted)"
    return f"{name} {show(measured)} ({measured / predicted - 1:+.0%} against {show(predicted)} predicted)"
