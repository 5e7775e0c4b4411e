"""Which ranks belong together, what is said of those that do not, and how a launcher's variables are read."""

import dataclasses
import threading
import time

import pytest
from helpers.ports import free_port

from lightning_shard.integrations import launched
from lightning_shard.strategies.meeting import Place, meet
from lightning_shard.strategies.peers import (
    Peer,
    describe_missing,
    find_fault,
    installed_versions,
    missing_ranks,
    note_unequal_memory,
)

GIB = 2**30


def world(size: int = 4, per_node: int = 2) -> list[Peer]:
    """``size`` ranks on nodes node-0, node-1..."""
    return [
        Peer(
            rank=rank,
            world_size=size,
            host=f"node-{rank // per_node}",
            pid=100 + rank,
            local_rank=rank % per_node,
            local_size=per_node,
            versions={"torch": "2.13.0", "lightning-shard": "0.1.0"},
            wishes={"strategy": "FSDP2Strategy", "dp_shard": "4"},
            device="NVIDIA H100 80GB HBM3",
            memory_bytes=80 * GIB,
        )
        for rank in range(size)
    ]


def changed(index: int, **fields: object) -> list[Peer]:
    peers = world()
    peers[index] = dataclasses.replace(peers[index], **fields)  # type: ignore[arg-type]
    return peers


def test_equal_ranks_have_no_fault() -> None:
    assert find_fault(world()) is None
    assert missing_ranks(world()) == []
    assert note_unequal_memory(world()) is None


@pytest.mark.parametrize(
    ("peers", "said"),
    [
        (changed(3, rank=1), ["rank 1", "101 on node-0", "103 on node-1", "NODE_RANK"]),
        (changed(2, world_size=8), ["disagree on the world size", "4: ranks 0, 1 on node-0, rank 3 on node-1", "8: rank 2"]),
        (changed(3, rank=5), ["There are 4 ranks", "rank 5 on node-1 came"]),
        (changed(2, versions={"torch": "2.12.1", "lightning-shard": "0.1.0"}),
         ["Rank 2 on node-1 differs from rank 0 on node-0", "torch 2.13.0 against 2.12.1", "same versions"]),
        (changed(1, wishes={"strategy": "FSDP2Strategy", "dp_shard": "2"}),
         ["Rank 1 on node-0 differs", "dp_shard 4 against 2", "same script, plan"]),
        (changed(1, wishes={"strategy": "TunedDDPStrategy"}), ["FSDP2Strategy against TunedDDPStrategy", "against absent"]),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_rank_and_host(peers: list[Peer], said: list[str]) -> None:
    fault = find_fault(peers)
    assert fault is not None
    for words in said:
        assert words in fault


def test_those_who_are_missing_are_named_by_rank_and_node() -> None:
    told = describe_missing(world()[:2])
    assert "ranks 2, 3 of 4 (node 1, counted from 0) did not come up" in told
    assert "ranks 0, 1 on node-0" in told
    assert find_fault(world()[:2]) is None


def test_a_smaller_device_is_named() -> None:
    note = note_unequal_memory(changed(3, device="NVIDIA A100-SXM4-40GB", memory_bytes=40 * GIB))
    assert note is not None
    assert "rank 3 on node-1: NVIDIA A100-SXM4-40GB, 40.0 GiB" in note
    assert "smallest" in note


def test_a_roll_brings_back_who_wrote_it() -> None:
    peers = world()
    assert Peer.read_roll("\n".join(peer.to_json() for peer in peers)) == peers


def test_versions_are_those_installed() -> None:
    assert {"torch", "lightning", "lightning-shard"} <= set(installed_versions())


def gather(peers: list[Peer], timeout_s: float = 5.0, place: Place | None = None) -> dict[int, str | None]:
    """What ``meet`` raises for each of these ranks, in threads."""
    place = place or Place(address="127.0.0.1", port=free_port(), timeout_s=timeout_s, hosted=False)
    heard: dict[int, str | None] = {}
    stores = []

    def come(index: int, peer: Peer) -> None:
        try:
            stores.append(meet(peer, place))
            heard[index] = None
        except RuntimeError as error:
            heard[index] = str(error)

    threads = [threading.Thread(target=come, args=pair) for pair in enumerate(peers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return heard


def test_all_who_belong_together_meet() -> None:
    assert gather(world(2)) == {0: None, 1: None}


def test_the_dead_of_an_earlier_attempt_are_not_counted() -> None:
    from torch.distributed import TCPStore

    server = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    place = Place(address="127.0.0.1", port=server.port, timeout_s=10.0, hosted=True)
    first, second = (
        gather(world(4), place=place),
        gather([dataclasses.replace(p, uid=f"new-{p.rank}") for p in world(4)], place=place),
    )
    assert first == second == dict.fromkeys(range(4))
    smaller = [dataclasses.replace(p, uid=f"small-{p.rank}") for p in world(2)]
    assert gather(smaller, place=place) == {0: None, 1: None}


def test_every_rank_hears_the_same_fault() -> None:
    heard = gather(changed(2, versions={"torch": "2.12.1"}))
    assert len(set(heard.values())) == 1
    assert "differs from rank 0 on node-0" in str(heard[0])


def test_every_rank_hears_who_is_missing() -> None:
    heard = gather(world()[:3], timeout_s=2.0)
    assert len(set(heard.values())) == 1
    assert "rank 3 of 4 (node 1, counted from 0) did not come up" in str(heard[0])


def test_a_rank_that_cannot_reach_rank_0_says_where_it_looked() -> None:
    heard = gather(world()[1:2], timeout_s=2.0)
    assert "Rank 1 on node-0 could not reach rank 0 at 127.0.0.1:" in str(heard[0])


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, {}),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, {"num_nodes": 2, "devices": 8}),
        ({"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4"}, {"num_nodes": 2, "devices": 4}),
        ({"SLURM_NTASKS": "8", "SLURM_JOB_NAME": "interactive"}, {}),
        ({"SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
         {"num_nodes": 1, "devices": 2}),
    ],
)  # fmt: skip
def test_the_world_is_nodes_times_devices(variables: dict[str, str], expected: dict[str, int]) -> None:
    assert launched(variables) == expected


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "2"}, "different numbers of ranks"),
        ({"SLURM_NTASKS": "5", "SLURM_NTASKS_PER_NODE": "2"}, "--ntasks-per-node"),
        ({"SLURM_NTASKS": "2"}, "Submit with --ntasks-per-node"),
    ],
)
def test_nodes_of_unequal_size_are_refused(variables: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        launched(variables)


def test_a_foreign_server_on_the_port_is_told() -> None:
    import socket

    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        place = Place(address="127.0.0.1", port=server.getsockname()[1], timeout_s=2.0, hosted=False)
        with pytest.raises(RuntimeError, match=r"Port \d+ of node-0 is in use, so rank 0 on node-0 cannot open it"):
            meet(world(2)[0], place)
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="Rank 1 on node-0 could not reach rank 0"):
            meet(world(2)[1], place)
        assert time.monotonic() - start < 60  # it did not hang
