"""Two network namespaces with a link of a chosen rate between them, gone again afterwards. Needs root and iproute2."""

import contextlib
import os
import subprocess
from collections.abc import Iterator

from benchmarks.launch import Node

RATES = {"10gbit": 512, "1gbit": 128, "100mbit": 16}
"""KiB that may pass at once, before the limit bites: about a millisecond's worth, so that small messages pay too."""
LATENCY = "50ms"
"""What may wait in the limiter's queue: TCP then backs off as it does on a real link."""


@contextlib.contextmanager
def nodes_over(link: str) -> Iterator[tuple[Node, ...]]:
    """Where ranks run: this machine for ``loopback``, else two namespaces joined by a link of that rate.

    Raises:
        ValueError: for a rate that is not known.
        RuntimeError: when the namespaces cannot be made; what was made is removed.
    """
    if link == "loopback":
        yield (Node(),)
        return
    if link not in RATES:
        raise ValueError(f"--link {link} is not known: loopback, {', '.join(RATES)}.")
    names = [f"bench{os.getpid()}{side}" for side in "ab"]
    try:
        _join(names, link)
        yield tuple(
            Node(
                prefix=("ip", "netns", "exec", name),
                environment={"GLOO_SOCKET_IFNAME": _interface(name), "GROUP_WORLD_SIZE": "2"},
            )
            for name in names
        )
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)  # and its end of the link


def _join(names: list[str], rate: str) -> None:
    first, second = names
    ends = [_interface(name) for name in names]
    for name in names:
        _ip("netns", "add", name)
    _ip("link", "add", ends[0], "netns", first, "type", "veth", "peer", "name", ends[1], "netns", second)
    for number, (name, end) in enumerate(zip(names, ends, strict=True), start=1):
        _ip("-n", name, "address", "add", f"10.77.0.{number}/24", "dev", end)
        _ip("-n", name, "link", "set", end, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        limit = ("rate", rate, "burst", f"{RATES[rate]}kb", "latency", LATENCY)
        _run("tc", "-n", name, "qdisc", "add", "dev", end, "root", "tbf", *limit)


def _interface(name: str) -> str:
    """Names of interfaces have 15 characters at most."""
    return f"{name.removeprefix('bench')}v"[-15:]


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {run.stderr.strip()}. Limited links need root and iproute2.")
