"""Two nodes on one machine: network and host-name namespaces joined by a veth pair, with a rate limit on it."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PORT = 29400


@dataclass
class Node:
    """One end of the cable."""

    name: str
    host: str
    address: str
    device: str
    processes: list["subprocess.Popen[str]"] = field(default_factory=list)

    @property
    def etc(self) -> Path:
        """Files that ``ip netns exec`` lays over /etc on this node."""
        return Path("/etc/netns", self.name)

    def start(self, command: Sequence[str], log: Path, **environment: str) -> "subprocess.Popen[str]":
        """Start a command here, as the leader of a process group of its own, with its output in ``log``."""
        inside = ["ip", "netns", "exec", self.name, "unshare", "--uts", "sh", "-c"]
        script = f'hostname {self.host} && exec "$@"'
        process = subprocess.Popen(
            [*inside, script, "sh", *command],
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            start_new_session=True,
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("LIGHTNING_SHARD")},
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": self.device,
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
                "PYTHONUNBUFFERED": "1",
                **environment,
            },
        )
        self.processes.append(process)
        return process

    def pull_the_plug(self) -> None:
        """End everything on this node at once, as a power cut would."""
        for pid in _in_namespace(self.name):
            _end(pid)
        for process in self.processes:
            process.wait()


@dataclass(frozen=True)
class Pair:
    """Two nodes and the cable between them."""

    a: Node
    b: Node

    def limit(self, bits_per_s: float | None) -> None:
        """Let no more than this much through, each way."""
        for node in (self.a, self.b):
            delete = ["tc", "-n", node.name, "qdisc", "del", "dev", node.device, "root"]
            subprocess.run(delete, capture_output=True, check=False)
            if bits_per_s:
                burst = max(128 * 1024, int(bits_per_s / 8 / 1000))  # a millisecond; less cannot be kept up
                shape = ["root", "tbf", "rate", f"{bits_per_s:.0f}bit", "burst", str(burst), "latency", "400ms"]
                _run("tc", "-n", node.name, "qdisc", "add", "dev", node.device, *shape)

    def cut(self) -> None:
        """Take the cable out: packets are lost in silence."""
        _run("ip", "-n", self.b.name, "link", "set", self.b.device, "down")


def why_not() -> str | None:
    """Why this machine cannot make the nodes; None where it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {', '.join(missing)}"
    name = f"lsn-{os.getpid()}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    try:
        tries = (
            ["ip", "-n", name, "link", "add", "try0", "type", "veth", "peer", "name", "try1"],
            ["tc", "-n", name, "qdisc", "add", "dev", "try0", "root", "tbf", "rate", "1gbit", "burst", "64k", "latency", "50ms"],
        )  # fmt: skip
        for command in tries:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                return f"network namespaces do not do here: {' '.join(command)}: {done.stderr.strip()}"
    finally:
        _run("ip", "netns", "del", name)
    return None


@contextmanager
def two_nodes(bits_per_s: float | None = None) -> Iterator[Pair]:
    """Two nodes that go, with all that runs on them, when the block ends."""
    _sweep()
    pid = os.getpid()
    nodes = [Node(f"lsn-{pid}-{x}", f"node-{x}", f"10.99.0.{i}", f"ls{pid}{x}") for i, x in enumerate("ab", start=1)]
    try:
        names = "127.0.0.1 localhost\n" + "".join(f"{node.address} {node.host}\n" for node in nodes)
        for node in nodes:
            node.etc.mkdir(parents=True)
            (node.etc / "hosts").write_text(names)
            _run("ip", "netns", "add", node.name)
        a, b = nodes
        _run("ip", "link", "add", a.device, "netns", a.name, "type", "veth", "peer", "name", b.device, "netns", b.name)
        for node in nodes:
            _run("ip", "-n", node.name, "addr", "add", f"{node.address}/24", "dev", node.device)
            _run("ip", "-n", node.name, "link", "set", node.device, "mtu", "9000", "up")
            _run("ip", "-n", node.name, "link", "set", "lo", "up")
        pair = Pair(a, b)
        pair.limit(bits_per_s)
        yield pair
    finally:
        for node in nodes:
            if Path("/run/netns", node.name).exists():
                node.pull_the_plug()
                _run("ip", "netns", "del", node.name)
            shutil.rmtree(node.etc, ignore_errors=True)


def torchrun(pair: Pair, node: Node, script: Sequence[str], *options: str, per_node: int = 2) -> list[str]:
    """The agent's command on one node; the nodes meet at the first one's address."""
    return [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(per_node), "--local-addr", node.address,
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{pair.a.address}:{PORT}", "--rdzv-id", "test", *options, *script,
    ]  # fmt: skip


def _sweep() -> None:
    """Take away nodes whose maker was killed before it could."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    for name in re.findall(r"^(lsn-\d+-\w+)", listed, flags=re.MULTILINE):
        if not Path("/proc", name.split("-")[1]).exists():
            for pid in _in_namespace(name):
                _end(pid)
            _run("ip", "netns", "del", name)
            shutil.rmtree(Path("/etc/netns", name), ignore_errors=True)


def _in_namespace(name: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True)
    return [int(pid) for pid in found.stdout.split()]


def _end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
