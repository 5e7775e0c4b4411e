"""Do the ranks of a run belong together? What each says of itself, and what is wrong with the whole."""

import dataclasses
import json
import os
import socket
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

import torch

import lightning_shard
from lightning_shard._compat import DDPStrategy

PACKAGES = ("torch", "lightning", "pytorch-lightning", "transformers", "peft")
"""Packages whose versions must be the same on all ranks, beside this one."""
MEMORY_TOLERANCE = 0.05
"""Devices whose memory differs by a smaller share count as equal."""
SHOWN = 8
"""Ranks that a message lists at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """One rank as it introduces itself."""

    rank: int
    world_size: int
    """Ranks that this one was told to expect."""
    host: str
    pid: int
    uid: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Another for every process, so that what a dead one left is not taken for a living one's."""
    local_rank: int = 0
    local_size: int = 1
    """Ranks on this one's node, as it was told."""
    versions: dict[str, str] = field(default_factory=dict)
    wishes: dict[str, str] = field(default_factory=dict)
    """What the user asked of the strategy: every rank must have been asked the same."""
    device: str = "cpu"
    memory_bytes: int | None = None
    """Memory of the device; None where it does not bound the plan."""

    @property
    def name(self) -> str:
        """How messages call this rank."""
        return f"rank {self.rank} on {self.host}"

    def to_json(self) -> str:
        """One line of the roll."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def read_roll(cls, lines: str) -> "list[Peer]":
        """The ranks of a roll, in the order in which they arrived."""
        return [cls(**json.loads(line)) for line in lines.splitlines() if line]


def installed_versions() -> dict[str, str]:
    """Versions of this package and of :data:`PACKAGES`, of those that are installed."""
    found = {"lightning-shard": lightning_shard.__version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def introduce(strategy: DDPStrategy, wishes: dict[str, str], memory_bytes: int | None = None) -> Peer:
    """This rank, for the others; ``memory_bytes`` where the user said what it may use."""
    device = strategy.root_device
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    if memory_bytes is None and properties is not None:
        memory_bytes = int(properties.total_memory)
    return Peer(
        rank=strategy.global_rank,
        world_size=strategy.world_size,
        local_rank=strategy.local_rank,
        local_size=strategy.num_processes,
        host=socket.gethostname(),
        pid=os.getpid(),
        versions=installed_versions(),
        wishes=wishes,
        device=device.type if properties is None else properties.name,
        memory_bytes=memory_bytes,
    )


def find_fault(peers: Sequence[Peer]) -> str | None:
    """What makes these ranks unfit to train together, with ranks and hosts named; None where nothing does.

    Says nothing of ranks that are still missing, so it may be asked while they arrive.
    """
    return _wrong_places(peers) or _differing(peers)


def missing_ranks(peers: Sequence[Peer]) -> list[int]:
    """Ranks that were expected and have not introduced themselves."""
    return sorted(set(range(peers[0].world_size)) - {peer.rank for peer in peers}) if peers else []


def describe_missing(peers: Sequence[Peer]) -> str:
    """Who is missing, and who is there."""
    missing, local = missing_ranks(peers), peers[0].local_size
    nodes = sorted({rank // local for rank in missing})
    return (
        f"{_ranks(missing)} of {peers[0].world_size} ({_nodes(nodes)}, counted from 0) did not come up; "
        f"there are {_names(peers)}"
    )


def note_unequal_memory(peers: Sequence[Peer]) -> str | None:
    """A remark when devices differ in kind or memory: the smallest decides the plan, the slowest the pace."""
    known = [peer for peer in peers if peer.memory_bytes]
    if not known:
        return None
    most = max(peer.memory_bytes or 0 for peer in known)
    small = [peer for peer in known if (peer.memory_bytes or 0) < most * (1 - MEMORY_TOLERANCE)]
    kinds = {peer.device for peer in known}
    if not small and len(kinds) == 1:
        return None
    listed = "; ".join(
        f"{peer.name}: {peer.device}, {(peer.memory_bytes or 0) / 2**30:.1f} GiB" for peer in (small or known)[:SHOWN]
    )
    return (
        f"Devices are not equal: most have {most / 2**30:.1f} GiB, but {listed}. The plan is made for the smallest, and "
        "every step waits for the slowest."
    )


def _wrong_places(peers: Sequence[Peer]) -> str | None:
    """Ranks given twice, beyond the world, or with another idea of its size."""
    first: dict[int, Peer] = {}
    for peer in peers:
        other = first.setdefault(peer.rank, peer)
        if other is not peer:
            return (
                f"Two processes say they are rank {peer.rank}: process {other.pid} on {other.host} and process {peer.pid} "
                f"on {peer.host}. Give every node its own NODE_RANK (torchrun --node-rank), and start one job per port."
            )
    sizes: dict[int, list[Peer]] = {}
    for peer in peers:
        sizes.setdefault(peer.world_size, []).append(peer)
    if len(sizes) > 1:
        said = "; ".join(f"{size}: {_names(those)}" for size, those in sorted(sizes.items()))
        return (
            f"Ranks disagree on the world size. They expect {said}. Start every node with the same number of nodes "
            "(Trainer(num_nodes=...), torchrun --nnodes) and of devices (Trainer(devices=...), --nproc-per-node)."
        )
    beyond = [peer for peer in peers if not 0 <= peer.rank < peer.world_size]
    if beyond:
        return (
            f"There are {peers[0].world_size} ranks, but {_names(beyond)} came: more nodes were started than expected."
        )
    return None


def _differing(peers: Sequence[Peer]) -> str | None:
    """Other versions or other wishes than those of the first rank."""
    lead = min(peers, key=lambda peer: peer.rank, default=None)
    if lead is None:
        return None
    for what, advice in (
        ("versions", "Install the same versions on every node"),
        ("wishes", "Start every rank with the same script, plan and options"),
    ):
        ours: dict[str, str] = getattr(lead, what)
        others = [peer for peer in peers if getattr(peer, what) != ours]
        if not others:
            continue
        theirs: dict[str, str] = getattr(others[0], what)
        names = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
        listed = "; ".join(f"{name} {ours.get(name, 'absent')} against {theirs.get(name, 'absent')}" for name in names)
        return f"{_names(others, capital=True)} differs from {lead.name} in {listed}. {advice}."
    return None


def _names(peers: Sequence[Peer], *, capital: bool = False) -> str:
    """``ranks 2, 3 on node-b and rank 0 on node-a``."""
    hosts: dict[str, list[int]] = {}
    for peer in peers:
        hosts.setdefault(peer.host, []).append(peer.rank)
    shown = [f"{_ranks(ranks)} on {host}" for host, ranks in list(hosts.items())[:SHOWN]]
    if len(hosts) > SHOWN:
        shown.append(f"{len(hosts) - SHOWN} more hosts")
    text = ", ".join(shown)
    return text[0].upper() + text[1:] if capital else text


def _ranks(ranks: Iterable[int]) -> str:
    listed = sorted(ranks)
    text = ", ".join(map(str, listed[:SHOWN])) + (f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else "")
    return f"rank{'s' if len(listed) > 1 else ''} {text}"


def _nodes(nodes: Sequence[int]) -> str:
    text = ", ".join(map(str, nodes[:SHOWN])) + (f" and {len(nodes) - SHOWN} more" if len(nodes) > SHOWN else "")
    return f"node{'s' if len(nodes) > 1 else ''} {text}"
