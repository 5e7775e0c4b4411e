"""The probe sees the network as it is."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from namespaces import torchrun, two_nodes, why_not

from lightning_shard.hardware import LinkProfile

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]

GBIT_PER_S = 1e9 / 8


# Shares of the limit that even a busy machine stays between: a fast link waits for the processors. (docs/many-nodes.md
# has what was read.)
@pytest.mark.parametrize(("gbit", "least", "most"), [(10.0, 0.1, 1.5), (1.0, 0.7, 1.2), (0.1, 0.85, 1.1)])
def test_the_probe_finds_the_limit_of_the_network(gbit: float, least: float, most: float, tmp_path: Path) -> None:
    file = tmp_path / "links.json"
    script = ["-m", "lightning_shard", "probe", "--output", str(file)]
    with two_nodes(gbit * 1e9) as pair:
        agents = [
            node.start(torchrun(pair, node, script, "--nnodes", "2", per_node=2), tmp_path / f"{node.host}.log")
            for node in (pair.a, pair.b)
        ]
        assert [agent.wait(timeout=400) for agent in agents] == [0, 0], (tmp_path / "node-a.log").read_text()[-3000:]
    profile = LinkProfile.load(file)
    assert profile.inter is not None
    assert least <= profile.inter.bytes_per_s / (gbit * GBIT_PER_S) <= most
    assert profile.intra is not None


def test_namespaces_leave_nothing_behind() -> None:
    with two_nodes() as pair:
        pair.a.start(["sleep", "300"], Path("/dev/null"))
        names = {pair.a.name, pair.b.name}
        during = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        assert all(name in during for name in names)
    after = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(name in after for name in names)
    assert not any(Path("/etc/netns", name).exists() for name in names)
