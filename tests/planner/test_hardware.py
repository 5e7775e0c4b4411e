"""The hardware tables: every row is found by a driver's name, has a source, and nothing is guessed."""

import pytest

from lightning_shard.hardware import GPUS, LINKS, Cluster, find_device, find_link, link_between_nodes
from lightning_shard.hardware.detection import HOST_PROCESS_BYTES
from lightning_shard.specs import parse_bytes

DRIVER_NAMES = {
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA A100 80GB PCIe": "a100-80",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "NVIDIA A10G": "a10g",
    "NVIDIA GeForce RTX 3090": "rtx-3090",
    "NVIDIA GeForce RTX 4090": "rtx-4090",
    "NVIDIA GeForce RTX 5090": "rtx-5090",
    "NVIDIA RTX 6000 Ada Generation": "rtx-6000-ada",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtx-pro-6000",
    "AMD Instinct MI250X": "mi250x",
    "AMD Instinct MI300X": "mi300x",
}


@pytest.mark.parametrize(("driver_name", "row"), DRIVER_NAMES.items())
def test_driver_names_find_their_row(driver_name: str, row: str) -> None:
    found = find_device(driver_name)
    assert found is not None
    assert found.name == row


def test_every_row_has_a_driver_name_a_source_and_links() -> None:
    assert {row.name for row in GPUS} == set(DRIVER_NAMES.values())
    for row in GPUS:
        assert row.source
        assert find_device(row.name) is row
        assert find_link(row.intra_link).scope == "intra"
        assert link_between_nodes(row.intra_link).scope == "inter"
        assert 0 < row.efficiency < 1
        assert row.flops["bfloat16"] >= row.flops["float32"]


@pytest.mark.parametrize("name", ["Tesla T4", "NVIDIA L40", "Quadro", "", "H100000"])
def test_an_unknown_device_is_unknown(name: str) -> None:
    assert find_device(name) is None


def test_links_stay_below_their_peak() -> None:
    for row in LINKS.values():
        assert 0 < row.bytes_per_s <= row.peak_bytes_per_s
        assert row.source
    with pytest.raises(ValueError, match="link 'pigeon' is not known"):
        find_link("pigeon")


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * 2**30), ("24GB", 24 * 10**9), ("512 MiB", 512 * 2**20), ("1.5gib", 3 * 2**29), ("123", 123)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "80 apples", "-3GiB", "0", "1e400GB"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_bytes(text)


def test_detection_here(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("for hosts without accelerators")
    monkeypatch.setattr("lightning_shard.hardware.detection.host_memory_bytes", lambda: 64 * 2**30)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    found = Cluster.detect()
    assert (found.num_nodes, found.devices_per_node, found.accelerator) == (2, 4, "cpu")
    assert found.capacity_bytes == 16 * 2**30 - HOST_PROCESS_BYTES
    assert Cluster.detect(devices=1, nodes=1).capacity_bytes == 64 * 2**30 - HOST_PROCESS_BYTES
    assert Cluster.from_dict(found.to_dict()) == found
