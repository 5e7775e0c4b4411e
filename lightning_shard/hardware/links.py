"""One row per link. ``bytes_per_s`` is a planning value: the bus bandwidth that collectives reach in public
nccl-tests runs, one direction, per device; ``lightning-shard probe`` replaces it by a measurement.
"""

from typing import Literal

from lightning_shard.hardware.cluster import Link

_G = 1e9
_READ = "as of 2026-11"


def _row(
    name: str,
    reached: float,
    peak: float,
    latency_us: float,
    scope: Literal["intra", "inter"],
    source: str,
    *,
    shared: bool = False,
) -> Link:
    """A row from GB/s (10^9) and microseconds."""
    return Link(
        name=name,
        bytes_per_s=reached * _G,
        peak_bytes_per_s=peak * _G,
        latency_s=latency_us * 1e-6,
        scope=scope,
        shared_by_node=shared,
        source=f"{source}, {_READ}",
    )


# fmt: off
LINKS: dict[str, Link] = {
    row.name: row
    for row in (
        _row("nvlink3", 230, 300, 4, "intra", "NVIDIA A100 datasheet (600 GB/s both ways); nccl-tests issue 149"),
        _row("nvlink4", 360, 450, 4, "intra", "NVIDIA H100 datasheet (900 GB/s both ways); nccl-tests issue 212"),
        _row("nvlink4-pair", 220, 300, 4, "intra", "NVIDIA H100 NVL datasheet (600 GB/s bridge between two cards)"),
        _row("nvlink5", 680, 900, 4, "intra", "NVIDIA DGX B200 datasheet (1.8 TB/s both ways)"),
        _row("xgmi-mi300x", 300, 448, 6, "intra", "AMD MI300X datasheet (7 links of 64 GB/s)"),
        _row("xgmi-mi250x", 70, 100, 6, "intra", "AMD MI250X datasheet (100 GB/s per link one way)"),
        _row("pcie3", 10, 15.8, 8, "intra", "PCI Express 3.0 x16"),
        _row("pcie4", 20, 31.5, 8, "intra", "PCI Express 4.0 x16"),
        _row("pcie4-no-p2p", 10, 31.5, 12, "intra",
             "PCI Express 4.0 x16 through host memory (cards without peer access)"),
        _row("pcie5", 54, 63, 8, "intra",
             "PCI Express 5.0 x16; rtx6kpro pcie-bandwidth page (54-56 GB/s peer to peer)"),
        _row("loopback", 1.0, 1.0, 50, "intra", "gloo between processes of one host; a planning value"),
        _row("ib200", 23, 25, 8, "inter", "InfiniBand HDR 200 Gb/s, one adapter per device"),
        _row("ib400", 42, 50, 8, "inter", "InfiniBand NDR 400 Gb/s, one adapter per device; nccl-tests issue 212"),
        _row("ib800", 85, 100, 8, "inter", "InfiniBand XDR 800 Gb/s, one adapter per device"),
        _row("efa400", 40, 50, 15, "inter", "AWS p4d: 400 Gb/s of EFA per node", shared=True),
        _row("efa3200", 340, 400, 15, "inter", "AWS p5: 3,200 Gb/s of EFA per node", shared=True),
        _row("roce200", 22, 25, 10, "inter", "RoCE v2 200 Gb/s, one adapter per device"),
        _row("roce400", 40, 50, 10, "inter", "RoCE v2 400 Gb/s, one adapter per device"),
        _row("eth10", 1.0, 1.25, 50, "inter", "10 Gbit Ethernet per node", shared=True),
        _row("eth25", 2.6, 3.125, 40, "inter", "25 Gbit Ethernet per node", shared=True),
        _row("eth100", 10, 12.5, 30, "inter", "100 Gbit Ethernet per node", shared=True),
    )
}
# fmt: on
_ALIASES = {
    "10gbe": "eth10",
    "25gbe": "eth25",
    "100gbe": "eth100",
    "ethernet": "eth10",
    "efa": "efa3200",
    "roce": "roce400",
}
_BETWEEN_NODES = {
    "nvlink3": "ib200",
    "nvlink4": "ib400",
    "nvlink5": "ib400",
    "xgmi-mi300x": "ib400",
    "xgmi-mi250x": "ib200",
}


def find_link(name: str) -> Link:
    """The row of a link's name.

    Raises:
        ValueError: for an unknown link; the names are listed.
    """
    key = name.strip().lower()
    row = LINKS.get(_ALIASES.get(key, key))
    if row is None:
        raise ValueError(f"link {name!r} is not known. Known: {', '.join(LINKS)}.")
    return row


def link_inside_node(device_link: str) -> Link:
    """The link between devices of one node, from a device's row."""
    return find_link(device_link)


def link_between_nodes(device_link: str) -> Link:
    """The usual network of machines with this in-node link: a planning value, to be given where it is known."""
    return find_link(_BETWEEN_NODES.get(device_link, "eth100" if device_link.startswith("pcie") else "eth10"))
