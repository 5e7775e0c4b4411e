"""Nodes that do not belong together: told within seconds, by rank and host, on every rank that is there."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fault_log import one_try
from namespaces import HERE, Node, Pair, two_nodes, why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]

PORT = "29611"
WAIT_S = 400.0
"""Patience with a busy machine; what is tested ends by itself long before."""
SOON = ("--start-timeout-s", "5")
"""Where somebody is missing."""
JOB = [sys.executable, str(HERE / "job.py")]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with two_nodes() as made:
        yield made


def start(pair: Pair, node: Node, out: Path, *options: str, node_rank: int, nodes: int = 2) -> Any:
    return node.start(
        [*JOB, "--out", str(out), "--num-nodes", str(nodes), "--steps", "2", "--start-timeout-s", "60", *options],
        out / f"{node.host}.log",
        MASTER_ADDR=pair.a.address,
        MASTER_PORT=PORT,
        NODE_RANK=str(node_rank),
        LOCAL_RANK="0",
    )


def outcome(process: Any, out: Path, node: Node) -> tuple[int, str]:
    """Exit code and output of a rank that must end by itself."""
    return process.wait(timeout=WAIT_S), (out / f"{node.host}.log").read_text()


def both(pair: Pair, out: Path, on_a: tuple[str, ...] = (), on_b: tuple[str, ...] = (), **kwargs: int) -> list[str]:
    """Output of a rank on each node, both of which must fail."""
    a = start(pair, pair.a, out, *on_a, node_rank=0)
    b = start(pair, pair.b, out, *on_b, node_rank=kwargs.get("rank_b", 1), nodes=kwargs.get("nodes_b", 2))
    results = [outcome(a, out, pair.a), outcome(b, out, pair.b)]
    assert [code for code, _ in results] == [1, 1], results
    return [text for _, text in results]


@pytest.fixture(autouse=True)
def logged(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every fault of this file is a line of the fault log: a start that hung or said nothing would be a lost run."""
    yield
    kind = request.node.name.removeprefix("test_").replace("_", " ")
    with suppress(AssertionError), one_try(kind, launcher="2 nodes x 1 rank"):
        assert request.node.passed


def test_a_node_that_never_comes_up(pair: Pair, tmp_path: Path) -> None:
    code, text = outcome(start(pair, pair.a, tmp_path, *SOON, node_rank=0), tmp_path, pair.a)
    assert code == 1
    assert "rank 1 of 2 (node 1, counted from 0) did not come up; there are rank 0 on node-a" in text


def test_a_first_node_that_never_comes_up(pair: Pair, tmp_path: Path) -> None:
    code, text = outcome(start(pair, pair.b, tmp_path, *SOON, node_rank=1), tmp_path, pair.b)
    assert code == 1
    assert f"Rank 1 on node-b could not reach rank 0 at {pair.a.address}:{PORT}" in text


def test_another_number_of_nodes(pair: Pair, tmp_path: Path) -> None:
    for text in both(pair, tmp_path, nodes_b=3):
        assert "disagree on the world size. They expect 2: rank 0 on node-a; 3: rank 1 on node-b" in text


def test_the_same_node_rank_twice(pair: Pair, tmp_path: Path) -> None:
    for text in both(pair, tmp_path, rank_b=0):
        assert "Two processes say they are rank 0" in text
        assert "on node-a" in text
        assert "on node-b" in text


def test_another_version(pair: Pair, tmp_path: Path) -> None:
    for text in both(pair, tmp_path, on_b=("--fake-version", "0.0.1")):
        assert "Rank 1 on node-b differs from rank 0 on node-a in lightning-shard" in text
        assert "against 0.0.1" in text


def test_another_plan(pair: Pair, tmp_path: Path) -> None:
    for text in both(pair, tmp_path, on_a=("--strategy", "ddp"), on_b=("--strategy", "fsdp2")):
        assert "Rank 1 on node-b differs from rank 0 on node-a" in text
        assert "TunedDDPStrategy against FSDP2Strategy" in text


def test_a_port_in_use(pair: Pair, tmp_path: Path) -> None:
    listen = f"import socket, time; s = socket.create_server(('', {PORT})); print('up', flush=True); time.sleep(300)"
    squatter = pair.a.start([sys.executable, "-c", listen], tmp_path / "squatter.log")
    while "up" not in (tmp_path / "squatter.log").read_text():
        assert squatter.poll() is None
    first, second = both(pair, tmp_path, on_b=SOON)
    assert f"Port {PORT} of node-a is in use, so rank 0 on node-a cannot open it" in first
    assert "Rank 1 on node-b could not reach rank 0" in second


def test_less_memory_on_one_node_is_said_and_planned_for(pair: Pair, tmp_path: Path) -> None:
    a = start(pair, pair.a, tmp_path, "--device-memory", str(8 * 2**30), node_rank=0)
    b = start(pair, pair.b, tmp_path, "--device-memory", str(4 * 2**30), node_rank=1)
    code, text = outcome(a, tmp_path, pair.a)
    assert (code, outcome(b, tmp_path, pair.b)[0]) == (0, 0), text
    assert "Devices are not equal: most have 8.0 GiB, but rank 1 on node-b: cpu, 4.0 GiB" in text
