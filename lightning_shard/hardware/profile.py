"""Links as measured on a cluster, kept as JSON, in place of the table's planning values."""

import dataclasses
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_shard.hardware.cluster import Cluster, Link

FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkProfile:
    """What ``lightning-shard probe`` measured: the link inside a node, and that between nodes."""

    intra: Link | None = None
    """None where a node has one device."""
    inter: Link | None = None
    """None where there is one node."""
    backend: str = ""
    """The collective library that was measured."""
    world_size: int = 1
    date: str = ""
    timings: tuple[dict[str, Any], ...] = ()
    """Every measurement: scope, collective, ranks, bytes, seconds."""

    def apply(self, cluster: Cluster) -> Cluster:
        """The cluster with measured links where there are any."""
        return dataclasses.replace(
            cluster, intra_link=self.intra or cluster.intra_link, inter_link=self.inter or cluster.inter_link
        )

    def save(self, path: str | Path) -> None:
        """Write the profile as JSON."""
        values = {"format": FORMAT, **dataclasses.asdict(self), "timings": list(self.timings)}
        Path(path).write_text(json.dumps(values, indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "LinkProfile":
        """The profile that :meth:`save` wrote.

        Raises:
            ValueError: when the file is missing, is not JSON, or is no link profile.
        """
        try:
            values = json.loads(Path(path).read_text())
            intra, inter = (None if values[name] is None else Link(**values[name]) for name in ("intra", "inter"))
            rest: dict[str, Any] = {key: values[key] for key in ("backend", "world_size", "date")}
            return cls(intra=intra, inter=inter, timings=tuple(values["timings"]), **rest)
        except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is no link profile ({type(error).__name__}: {error}). Make one with lightning-shard probe --output {path}."
            ) from error


def fit_link(name: str, scope: Any, timings: list[tuple[int, int, int, float]], *, source: str) -> Link:
    """Latency and bandwidth that explain measured collectives.

    A collective that passes ``k`` times around a ring of ``n`` ranks takes
    ``k (n-1) latency + k (n-1)/n bytes / bandwidth`` (k is 1 for an all-gather, 2 for an all-reduce). The bandwidth is
    what the two largest sizes differ by, which a network that lets short bursts through unhindered does not blur; the
    latency is what is left of the smallest size. Both are the median over kinds of collective, neither below zero.

    Args:
        name: of the link.
        scope: "intra" or "inter".
        timings: (k, n, bytes of the whole side, seconds) of each measurement.
        source: where the figures come from.
    """
    kinds: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for k, n, size, seconds in timings:
        kinds.setdefault((k, n), []).append((k * (n - 1) / n * size, seconds))
    per_byte_s = statistics.median(_slope(sorted(rows)) for rows in kinds.values())
    latencies = []
    for (k, n), rows in kinds.items():
        volume, seconds = min(rows)
        latencies.append((seconds - volume * per_byte_s) / (k * (n - 1)))
    latency_s = max(0.0, statistics.median(latencies))
    bandwidth = 1.0 / per_byte_s
    return Link(
        name=name, bytes_per_s=bandwidth, peak_bytes_per_s=bandwidth, latency_s=latency_s, scope=scope, source=source
    )


def _slope(rows: list[tuple[float, float]]) -> float:
    """Seconds per byte between the two largest volumes; of the largest alone where noise or a single size leaves no other."""
    volume, seconds = rows[-1]
    if len(rows) > 1:
        before, sooner = rows[-2]
        if volume > before and seconds > sooner:
            return (seconds - sooner) / (volume - before)
    return seconds / volume
