"""Measured links: the fit, the file, and a real probe over gloo."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_shard.cli import main
from lightning_shard.hardware import Cluster, LinkProfile, find_device, link_between_nodes, link_inside_node
from lightning_shard.hardware.profile import Timing, fit_link
from lightning_shard.probe import measure_links
from lightning_shard.probe.measure import _fit
from lightning_shard.testing import ranks
from lightning_shard.timing.links import all_reduce_s, collective_s, ring_of

LATENCY_S, BYTES_PER_S = 2e-5, 1.5e9


SHARES = {"send": 1.0, "all_gather": 0.7, "all_reduce": 0.9}
SIZES = (2**16, 2**20, 2**24)


def timing(kind: Any, size: int, ranks: int = 2) -> Timing:
    empty = Timing(kind=kind, ranks=ranks, size_bytes=size, seconds=0.0)
    seconds = empty.hops * LATENCY_S + empty.volume_bytes / (BYTES_PER_S * SHARES[kind])
    return dataclasses.replace(empty, seconds=seconds)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_fit_finds_what_made_the_timings(ranks: int) -> None:
    timings = [timing(kind, size, ranks) for kind in SHARES for size in SIZES]
    link = fit_link("x", "intra", timings, source="test")
    assert link.latency_s == pytest.approx(LATENCY_S)
    assert link.bytes_per_s == pytest.approx(BYTES_PER_S)
    assert link.all_gather_share == pytest.approx(0.7)
    assert link.all_reduce_share == pytest.approx(0.9)


def test_what_was_timed_is_what_the_fit_foretells() -> None:
    device = find_device("h100-sxm")
    assert device is not None
    link = fit_link("x", "intra", [timing(kind, size, 4) for kind in SHARES for size in SIZES], source="test")
    cluster = Cluster(devices_per_node=4, device=device, intra_link=link, inter_link=link)
    ring = ring_of(cluster, 4, 1)
    for size in SIZES:
        assert collective_s(cluster, ring, size, messages=1) == pytest.approx(timing("all_gather", size, 4).seconds)
        assert all_reduce_s(cluster, ring, size, messages=1) == pytest.approx(timing("all_reduce", size, 4).seconds)


def test_noise_never_gives_a_negative_latency() -> None:
    timings = [timing("all_gather", 2**24), dataclasses.replace(timing("all_gather", 2**16), seconds=1e-9)]
    link = fit_link("x", "intra", timings, source="test")
    assert link.latency_s >= 0
    assert link.bytes_per_s > 0


def measure() -> LinkProfile:
    return measure_links(2, torch.device("cpu"), sizes_bytes=(2**14, 2**22))


@ranks(2)
def test_two_ranks_of_a_node_have_one_link() -> None:
    profile = measure()
    assert profile.inter is None
    assert profile.intra is not None
    assert 1e6 < profile.intra.bytes_per_s < 1e12
    assert {(row["scope"], row["kind"]) for row in profile.timings} == {
        ("intra", "send"),
        ("intra", "all_gather"),
        ("intra", "all_reduce"),
    }
    assert max(profile.intra.all_gather_share, profile.intra.all_reduce_share) <= 1.0


@ranks(4)
def test_two_nodes_of_two_ranks_have_both_links() -> None:
    profile = measure()
    assert profile.intra is not None
    assert profile.inter is not None
    assert profile.inter.shared_by_node  # two ranks of a node were measured together
    assert not profile.intra.shared_by_node
    around_everyone = [row for row in profile.timings if row["ranks"] == 4]
    assert {(row["scope"], row["kind"]) for row in around_everyone} == {
        ("inter", "all_gather")
    }  # as shards on both nodes
    assert {row["ranks"] for row in profile.timings} == {2, 4}


def test_a_profile_replaces_the_links_of_a_cluster(tmp_path: Path) -> None:
    link = fit_link("fast", "intra", [timing("send", 2**20), timing("all_gather", 2**24)], source="test")
    LinkProfile(intra=link, backend="gloo", world_size=2, date="2026-11-30").save(tmp_path / "links.json")
    device = find_device("h100-sxm")
    assert device is not None
    cluster = Cluster(device=device, intra_link=link_inside_node("nvlink4"), inter_link=link_between_nodes("nvlink4"))
    changed = LinkProfile.load(tmp_path / "links.json").apply(cluster)
    assert changed.intra_link == link
    assert changed.inter_link == cluster.inter_link


def test_a_file_that_is_no_profile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "links.json").write_text("{}")
    with pytest.raises(ValueError, match="is no link profile"):
        LinkProfile.load(tmp_path / "links.json")


def test_one_device_has_no_link(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--devices", "1"]) == 2
    assert "a link has two ends" in capsys.readouterr().err


@pytest.mark.parametrize("local_size", [1, 4])
def test_a_ring_around_everyone_is_weighed_as_one_of_a_nodes_many(local_size: int) -> None:
    """Pairs across two nodes share the link's 100 MB/s; one ring around all ranks reaches 80 of them alone."""
    rows = [
        {"scope": "inter", "kind": kind, "ranks": ranks, "bytes": size, "seconds": sent * parts / speed}
        for size in (2**20, 2**24)
        for kind, ranks, sent, parts, speed in (
            ("send", 2, size, local_size, 100e6),
            ("all_reduce", 2, size, local_size, 100e6),
            ("all_gather", 2 * local_size, size * (1 - 0.5 / local_size), 1, 80e6),
        )
    ]
    link = _fit("inter", rows, "test", local_size)
    assert link.bytes_per_s == pytest.approx(100e6, rel=1e-3)
    assert link.all_gather_share == pytest.approx(0.8, rel=1e-3)
