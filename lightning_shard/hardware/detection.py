"""What this machine has: its accelerators, or the host itself. Reads the environment, and imports torch when asked."""

import os
from pathlib import Path

from lightning_shard.hardware.cluster import Cluster
from lightning_shard.hardware.gpus import HOST, find_device
from lightning_shard.hardware.host import measured_host
from lightning_shard.hardware.links import link_between_nodes, link_inside_node

HOST_PROCESS_BYTES = 512 * 2**20
"""Resident memory of a process that has imported torch, Lightning and transformers, before any model."""
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def detect(*, devices: int | None = None, nodes: int | None = None) -> Cluster:
    """The cluster this process sees: its accelerators, else host memory shared by its processes,
    at the speed measured here (:func:`lightning_shard.hardware.host.measured_host`).

    Nodes and devices per node come from the launcher's WORLD_SIZE and LOCAL_WORLD_SIZE unless given.

    Raises:
        ValueError: when the accelerator is not in the hardware table.
    """
    import torch

    if torch.cuda.is_available():
        return _accelerators(torch.cuda.get_device_name(0), torch.cuda.device_count(), _memory(torch), devices, nodes)
    per_node = devices or _launched("LOCAL_WORLD_SIZE") or 1
    link = link_inside_node(HOST.intra_link)
    return Cluster(
        num_nodes=nodes or _nodes(per_node),
        devices_per_node=per_node,
        device=measured_host(per_node),
        device_memory_bytes=max(1, host_memory_bytes() // per_node - HOST_PROCESS_BYTES),
        intra_link=link,
        inter_link=link_between_nodes(HOST.intra_link),
        accelerator="cpu",
    )


def host_memory_bytes() -> int:
    """Memory of this host, or what its container may use where that is less."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit in map(Path, _CGROUP_LIMITS):
        text = limit.read_text().strip() if limit.is_file() else ""
        if text.isdigit():
            sizes.append(int(text))
    return min(sizes)


def _accelerators(name: str, count: int, memory_bytes: int, devices: int | None, nodes: int | None) -> Cluster:
    device = find_device(name)
    if device is None:
        raise ValueError(
            f"The device {name!r} is not in the hardware table, so its speed is not known. Name the nearest row "
            "(lightning-shard devices lists them), or give the memory of one device."
        )
    per_node = devices or _launched("LOCAL_WORLD_SIZE") or count
    return Cluster(
        num_nodes=nodes or _nodes(per_node),
        devices_per_node=per_node,
        device=device,
        device_memory_bytes=memory_bytes,
        intra_link=link_inside_node(device.intra_link),
        inter_link=link_between_nodes(device.intra_link),
    )


def _memory(torch: object) -> int:
    """Total memory of the smallest visible device."""
    cuda = torch.cuda  # type: ignore[attr-defined]
    return min(int(cuda.get_device_properties(index).total_memory) for index in range(cuda.device_count()))


def _nodes(per_node: int) -> int:
    world = _launched("WORLD_SIZE") or per_node
    return max(1, world // per_node)


def _launched(variable: str) -> int | None:
    value = os.environ.get(variable, "")
    return int(value) if value.isdigit() and int(value) > 0 else None
