"""The hardware tables: every row is found by a driver's name, has a source, and nothing is guessed."""

import math
from pathlib import Path

import pytest

from lightning_shard.hardware import GPUS, HOST, LINKS, Cluster, find_device, find_link, host, link_between_nodes
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


@pytest.mark.parametrize(
    ("processes", "threads", "cores_each"),
    [(1, 1, 1.0), (1, 2, 2.0), (2, 2, 1.0), (4, 1, 0.5), (4, 2, 0.5), (8, 1, 0.25)],
)
def test_ranks_share_the_cores(
    processes: int, threads: int, cores_each: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two cores: as fast as the threads where there is one for each, slower in proportion where there are more ranks."""
    monkeypatch.setattr(host, "product_flops", {"float32": 1e11, "bfloat16": 3e11}.__getitem__)
    monkeypatch.setattr(host, "usable_cores", lambda: 2.0)
    monkeypatch.setattr(host, "_threads", lambda: threads)
    found, part = host.measured_host(processes), min(1.0, cores_each)
    assert (found.flops["float32"], found.flops["bfloat16"]) == (1e11 * cores_each, 3e11 * cores_each)
    assert found.memory_bytes_per_s == HOST.memory_bytes_per_s * part
    assert found.host_work_s == HOST.host_work_s / part


@pytest.mark.parametrize(
    ("texts", "cores"),
    [(("200000 100000",), 2.0), (("150000 100000",), 1.5), (("max 100000",), math.inf), (("-1", "100000"), math.inf),
     (("300000", "100000"), 3.0), ((), math.inf)],
)  # fmt: skip
def test_a_containers_share_of_the_cores(texts: tuple[str, ...], cores: float, tmp_path: Path) -> None:
    """cpu.max of one hierarchy, quota and period of the other; either may set no limit."""
    for name, text in zip(("quota", "period"), texts, strict=False):
        (tmp_path / name).write_text(f"{text}\n")
    period = str(tmp_path / "period") if len(texts) > 1 else None
    assert host._quota(str(tmp_path / "quota"), period) == cores


def test_a_product_is_timed_once_and_threads_stay() -> None:
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    assert 1e8 < host.product_flops("float32") < 1e13
    assert host.product_flops("float32") == host.product_flops("float32")
    assert torch.get_num_threads() == before
