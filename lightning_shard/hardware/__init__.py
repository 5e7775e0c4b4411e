"""What devices and links can do: a row each with its source, and what is here."""

from lightning_shard.hardware.cluster import Cluster, Device, Link
from lightning_shard.hardware.detection import detect
from lightning_shard.hardware.gpus import GPUS, HOST, find_device
from lightning_shard.hardware.links import LINKS, find_link, link_between_nodes, link_inside_node
from lightning_shard.hardware.profile import LinkProfile

__all__ = [
    "Cluster",
    "Device",
    "Link",
    "GPUS",
    "HOST",
    "LINKS",
    "LinkProfile",
    "detect",
    "find_device",
    "find_link",
    "link_between_nodes",
    "link_inside_node",
]
