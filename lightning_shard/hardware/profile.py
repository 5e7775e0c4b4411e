"""Links as measured on a cluster, kept as JSON, in place of the table's planning values."""

import dataclasses
import json
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
    """Latency and bandwidth that explain measured collectives best.

    A collective that passes ``k`` times around a ring of ``n`` ranks takes
    ``k (n-1) latency + k (n-1)/n bytes / bandwidth`` (k is 1 for an all-gather, 2 for an all-reduce): the least
    squares of relative errors over both unknowns, neither below zero.

    Args:
        name: of the link.
        scope: "intra" or "inter".
        timings: (k, n, bytes of the whole side, seconds) of each measurement.
        source: where the figures come from.
    """
    hops = [k * (n - 1) / t for k, n, _, t in timings]
    volumes = [k * (n - 1) / n * size / t for k, n, size, t in timings]
    hh, vv = sum(h * h for h in hops), sum(v * v for v in volumes)
    hv, h1, v1 = sum(h * v for h, v in zip(hops, volumes, strict=True)), sum(hops), sum(volumes)
    determinant = hh * vv - hv * hv
    latency_s = (h1 * vv - v1 * hv) / determinant if determinant > 0 else 0.0
    per_byte_s = (v1 * hh - h1 * hv) / determinant if determinant > 0 else v1 / vv
    if latency_s < 0 or per_byte_s <= 0:  # noise: put all of the time down to the bytes, which errs on the slow side
        latency_s, per_byte_s = 0.0, v1 / vv
    bandwidth = 1.0 / per_byte_s
    return Link(
        name=name, bytes_per_s=bandwidth, peak_bytes_per_s=bandwidth, latency_s=latency_s, scope=scope, source=source
    )
