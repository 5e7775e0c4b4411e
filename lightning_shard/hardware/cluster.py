"""What there is to run on: devices, their memory and the links between them."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from lightning_shard.specs.sizes import require_choice, require_count


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One kind of accelerator (or host), from a datasheet. Peaks are dense, with FP32 accumulation."""

    name: str
    match: tuple[str, ...] = ()
    """Words of the driver's device name, in lower case, that identify it."""
    memory_bytes: int
    """Memory as sold; what the driver reports is a little less."""
    memory_bytes_per_s: float
    flops: dict[str, float]
    """Dense peak per dtype, FLOP/s."""
    efficiency: float = 0.4
    """Share of the peak that a training step reaches in its matrix products: a planning value."""
    host_work_s: float = 0.0
    """What a gather or reduction of shards costs the processor that computes, beside the transfer: hosts only."""
    intra_link: str = "pcie4"
    """The link between devices of one node, a name of the link table."""
    source: str = ""

    def flops_of(self, dtype: str) -> float:
        """Peak FLOP/s of a dtype; FP32's where the table has no figure for it."""
        return self.flops.get(dtype, self.flops["float32"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One kind of link, as one device sees it in one direction."""

    name: str
    bytes_per_s: float
    """Bandwidth a transfer reaches (bus bandwidth in nccl-tests' terms): a planning value below the peak."""
    latency_s: float
    """Time of one hop of a collective, launch included."""
    peak_bytes_per_s: float
    """The datasheet's figure."""
    scope: Literal["intra", "inter"]
    """Inside a node, or between nodes."""
    shared_by_node: bool = False
    """One adapter for the whole node, so its devices divide the bandwidth."""
    all_gather_share: float = 1.0
    """What all-gathers and reduce-scatters reach of ``bytes_per_s``, where that was measured."""
    all_reduce_share: float = 1.0
    """Likewise all-reduces, which also wait for the sums."""
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Equal nodes of equal devices.

    Raises:
        ValueError: when a count or size is not positive.
    """

    num_nodes: int = 1
    devices_per_node: int = 1
    device: Device
    device_memory_bytes: int | None = None
    """What one process may use on its device; None takes the device's own figure."""
    intra_link: Link
    inter_link: Link
    accelerator: Literal["gpu", "cpu"] = "gpu"
    """``cpu`` means processes that share a host's memory: no device context, no caching allocator."""

    def __post_init__(self) -> None:
        require_count("num_nodes", self.num_nodes)
        require_count("devices_per_node", self.devices_per_node)
        require_choice("accelerator", self.accelerator, ("gpu", "cpu"))
        if self.device_memory_bytes is not None:
            require_count("device_memory_bytes", self.device_memory_bytes)

    @property
    def world_size(self) -> int:
        """Devices in all."""
        return self.num_nodes * self.devices_per_node

    @property
    def capacity_bytes(self) -> int:
        """Memory of one device."""
        return self.device.memory_bytes if self.device_memory_bytes is None else self.device_memory_bytes

    def link_bytes_per_s(self, link: Link) -> float:
        """Bandwidth of a link for one device, after sharing it inside the node."""
        return link.bytes_per_s / (self.devices_per_node if link.shared_by_node else 1)

    @classmethod
    def detect(cls, *, devices: int | None = None, nodes: int | None = None) -> "Cluster":
        """What this machine has. The one method here that imports torch; on a host it times a product."""
        from lightning_shard.hardware.detection import detect

        return detect(devices=devices, nodes=nodes)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Cluster":
        """The cluster that :meth:`to_dict` wrote."""
        device = {**values["device"], "match": tuple(values["device"]["match"])}
        links = {key: Link(**values[key]) for key in ("intra_link", "inter_link")}
        return cls(**{**values, "device": Device(**device), **links})
