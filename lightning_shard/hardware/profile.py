"""Links as measured on a cluster, kept as JSON, in place of the table's planning values."""

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
    """Every measurement: scope, kind, ranks, bytes, seconds."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """One measurement: a transfer from one rank to another, or a collective around a ring."""

    kind: Literal["send", "all_gather", "all_reduce"]
    ranks: int
    size_bytes: int
    """Of what is sent, or of the collective's whole side."""
    seconds: float

    @property
    def hops(self) -> int:
        """Steps one after the other: an all-reduce passes around the ring twice."""
        return {"send": 1, "all_gather": self.ranks - 1, "all_reduce": 2 * (self.ranks - 1)}[self.kind]

    @property
    def volume_bytes(self) -> float:
        """Bytes that each rank sends."""
        return self.size_bytes if self.kind == "send" else self.hops / self.ranks * self.size_bytes


def fit_link(name: str, scope: Literal["intra", "inter"], timings: Sequence[Timing], *, source: str) -> Link:
    """Latency and bandwidth that explain what was measured.

    Each takes ``hops x latency + volume / bandwidth``. The bandwidth of a kind is what its two largest sizes differ by,
    which a network that lets short bursts through unhindered does not blur. The link's is that of its fastest kind: it
    carried that much; what the collectives reach of it is said beside it (on gloo an all-gather leaves a slow network
    idle for up to a third of its time, an all-reduce does not). The latency is what is left of the smallest size, the
    median over kinds, not below zero.

    Args:
        name: of the link.
        scope: "intra" or "inter".
        timings: of at least one kind.
        source: where the figures come from.
    """
    kinds: dict[str, list[Timing]] = {}
    for timing in sorted(timings, key=lambda each: each.volume_bytes):
        kinds.setdefault(timing.kind, []).append(timing)
    speeds = {kind: _bytes_per_s(rows) for kind, rows in kinds.items()}
    most = max(speeds.values())
    smallest = [rows[0] for rows in kinds.values()]
    latencies = [(each.seconds - each.volume_bytes / speeds[each.kind]) / each.hops for each in smallest]
    return Link(
        name=name,
        bytes_per_s=most,
        peak_bytes_per_s=most,
        latency_s=max(0.0, statistics.median(latencies)),
        scope=scope,
        source=source,
        all_gather_share=speeds.get("all_gather", most) / most,
        all_reduce_share=speeds.get("all_reduce", most) / most,
    )


def _bytes_per_s(rows: list[Timing]) -> float:
    """Between the two largest volumes; of the largest alone where noise or a single size leaves no other."""
    last = rows[-1]
    if len(rows) > 1:
        before = rows[-2]
        if last.volume_bytes > before.volume_bytes and last.seconds > before.seconds:
            return (last.volume_bytes - before.volume_bytes) / (last.seconds - before.seconds)
    return last.volume_bytes / last.seconds
