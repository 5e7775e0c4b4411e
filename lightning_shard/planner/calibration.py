"""What an earlier run measured, to correct the next plan by."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_shard.hardware import Cluster
from lightning_shard.specs import format_bytes

FLOOR = ("frozen_weights", "trained_weights", "optimizer_state")
"""Terms that no step can do without (:func:`lightning_shard.memory.floor_bytes`)."""


def expected_step_s(estimate: Mapping[str, Any], measured: Mapping[str, Any]) -> float | None:
    """The estimated step at the run's own batches: a plan is for the longest, and computing takes time by positions."""
    step_s, fill = estimate.get("step_s"), measured.get("batch_fill")
    if not step_s or fill is None:
        return step_s or None
    return float(step_s - (1 - fill) * (estimate.get("compute_s") or 0.0))


def _number(values: Any, name: str) -> float:
    """A figure of the file; 0 where there is none."""
    value = values.get(name) or 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise ValueError(f"{name} is {value!r}")
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Measured against estimated, from the file that ``ShardMonitor`` keeps beside a plan."""

    step_ratio: float | None = None
    """Measured step time over the estimated one at the run's own batches; None where either is missing."""
    residual_bytes: int | None = None
    """Measured reserved bytes less the estimated ones; None on a host, which measures none."""
    source: str = ""

    @classmethod
    def load(cls, path: str | Path) -> "Calibration":
        """Read a monitor's file.

        Raises:
            ValueError: when it is missing, is not one, or holds nothing measured.
        """
        try:
            record: dict[str, Any] = json.loads(Path(path).read_text())
            measured, estimate = record["measured"], record["estimate"] or {}
            step, reserved = (_number(measured, name) for name in ("step_s", "reserved_bytes"))
            for values, name in ((measured, "batch_fill"), (estimate, "step_s"), (estimate, "compute_s")):
                _number(values, name)
            step_s, reserved_bytes = expected_step_s(estimate, measured), _number(estimate, "reserved_bytes")
            floor = sum(_number(estimate.get("terms") or {}, name) for name in FLOOR)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path} is no file of ShardMonitor ({type(error).__name__}: {error}). Train once with "
                "ShardMonitor() among the callbacks, and give the shard_monitor.json it writes."
            ) from error
        if reserved and reserved < floor:
            raise ValueError(
                f"{path} is impossible: {format_bytes(int(reserved))} measured, and the weights and optimizer state of its "
                f"plan alone take {format_bytes(int(floor))}. Measurement and estimate are not of one run: train again with ShardMonitor."
            )
        if not step and not reserved:
            raise ValueError(f"{path} holds no measurement: the run was too short. Train for ten steps or more.")
        return cls(
            step_ratio=step / step_s if step and step_s else None,
            residual_bytes=int(reserved - reserved_bytes) if reserved and reserved_bytes else None,
            source=str(path),
        )

    def apply(self, cluster: Cluster) -> Cluster:
        """The cluster as the earlier run found it: its speed scaled, what estimates missed taken off the memory."""
        if self.step_ratio is not None:
            device = cluster.device
            slower = dataclasses.replace(
                device,
                efficiency=device.efficiency / self.step_ratio,
                memory_bytes_per_s=device.memory_bytes_per_s / self.step_ratio,
                host_work_s=device.host_work_s * self.step_ratio,
            )
            cluster = dataclasses.replace(cluster, device=slower)
        if self.residual_bytes is not None:
            cluster = dataclasses.replace(cluster, device_memory_bytes=cluster.capacity_bytes - self.residual_bytes)
        return cluster

    def describe(self) -> str:
        """One line for people."""
        parts = []
        if self.step_ratio is not None:
            parts.append(f"steps took {self.step_ratio:.2f} times the estimate")
        if self.residual_bytes is not None:
            parts.append(f"the allocator held {self.residual_bytes / 2**20:+,.0f} MiB against the estimate")
        return f"Calibrated by {self.source}: {', '.join(parts)}."
