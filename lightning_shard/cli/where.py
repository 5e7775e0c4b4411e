"""The options that say where a job runs, and the Cluster they describe."""

import argparse
import dataclasses
from typing import NoReturn

from typing_extensions import override

from lightning_shard.hardware import (
    GPUS,
    LINKS,
    Cluster,
    Device,
    find_device,
    find_link,
    link_between_nodes,
    link_inside_node,
)
from lightning_shard.specs import parse_bytes


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, as everything else does."""

    @override
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}. See {self.prog} --help.")


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to a parser."""
    where = parser.add_argument_group("where it runs (without --device: what this machine has)")
    where.add_argument("--devices", type=int, help="devices per node")
    where.add_argument("--nodes", type=int, default=1, help="nodes (default 1)")
    where.add_argument("--device", help=f"one of {', '.join(row.name for row in GPUS)}, or cpu")
    where.add_argument("--device-memory", help="memory of one device, such as 80GiB or 24GB")
    where.add_argument("--link", help="link inside a node, such as nvlink4 or pcie4 (default: the device's)")
    where.add_argument("--network", help="link between nodes, such as ib400 or eth100")


def read_cluster(arguments: argparse.Namespace) -> Cluster:
    """The cluster of parsed arguments.

    Raises:
        ValueError: for an unknown device or link, a bad size, or a count below 1.
    """
    for name in ("devices", "nodes"):
        count = getattr(arguments, name)
        if count is not None and count < 1:
            raise ValueError(f"--{name} {count} must be 1 or more.")
    memory_bytes = None if arguments.device_memory is None else parse_bytes(arguments.device_memory)
    if arguments.device is None and memory_bytes is None:
        return _with_links(_detected(arguments), arguments)
    device = _device(arguments.device, memory_bytes)
    cluster = Cluster(
        num_nodes=arguments.nodes,
        devices_per_node=arguments.devices or 1,
        device=device,
        device_memory_bytes=memory_bytes,
        intra_link=link_inside_node(device.intra_link),
        inter_link=link_between_nodes(device.intra_link),
        accelerator="cpu" if device.name == "cpu" else "gpu",
    )
    return _with_links(cluster, arguments)


def _detected(arguments: argparse.Namespace) -> Cluster:
    try:
        return Cluster.detect(devices=arguments.devices, nodes=arguments.nodes)
    except ValueError as error:
        raise ValueError(f"{error} Options: --device, or --device-memory.") from error


def _device(name: str | None, memory_bytes: int | None) -> Device:
    """The named row; with a memory size alone, the nearest row at least that large lends its speed."""
    if name is not None:
        row = find_device(name)
        if row is None:
            known = ", ".join(row.name for row in GPUS)
            raise ValueError(
                f"device {name!r} is not in the hardware table. Known: {known}; or give --device-memory alone."
            )
        return row
    assert memory_bytes is not None
    larger = [row for row in GPUS if row.memory_bytes >= memory_bytes]
    row = min(larger or GPUS, key=lambda row: abs(row.memory_bytes - memory_bytes))
    return dataclasses.replace(row, name=f"unnamed device (speed of {row.name})")


def _with_links(cluster: Cluster, arguments: argparse.Namespace) -> Cluster:
    inside = cluster.intra_link if arguments.link is None else find_link(arguments.link)
    between = cluster.inter_link if arguments.network is None else find_link(arguments.network)
    for option, link, scope in (("--link", inside, "intra"), ("--network", between, "inter")):
        if link.scope != scope:
            fitting = ", ".join(row.name for row in LINKS.values() if row.scope == scope)
            raise ValueError(f"{option} {link.name} is not a link of that kind. Choose from {fitting}.")
    return dataclasses.replace(cluster, intra_link=inside, inter_link=between)
