"""Start the ranks of a benchmark: on this machine, on its GPUs, or one group per network namespace."""

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import HERE

TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Node:
    """Where some of the ranks run."""

    prefix: tuple[str, ...] = ()
    """Command that starts a process there, such as ``ip netns exec NAME``."""
    environment: Mapping[str, str] = field(default_factory=dict)


def launch(
    num_ranks: int,
    body: Callable[..., Any],
    *arguments: Any,
    device: str = "cpu",
    nodes: Sequence[Node] = (Node(),),
    timeout_s: float = TIMEOUT_S,
) -> list[Any]:
    """What ``body(*arguments)`` returns on every rank, inside an initialised process group where there are several.

    Args:
        num_ranks: in all; they are dealt to the nodes in equal parts.
        body: a function of a module, called by name.
        arguments: picklable.
        device: ``cpu`` (gloo, one thread per rank) or ``cuda`` (nccl, a GPU per rank).
        nodes: where they run.
        timeout_s: after which all ranks are ended.

    Raises:
        RuntimeError: with the output of a rank that failed.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        (folder / "task").write_bytes(pickle.dumps((device, body, arguments)))
        ranks = [_start(rank, num_ranks, folder, nodes, device) for rank in range(num_ranks)]
        try:
            _wait(ranks, folder, timeout_s)
        finally:
            for rank in ranks:
                _end(rank)
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(num_ranks)]


def _start(rank: int, num_ranks: int, folder: Path, nodes: Sequence[Node], device: str) -> "subprocess.Popen[bytes]":
    per_node = num_ranks // len(nodes)
    node = nodes[rank // per_node]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % per_node),
        "GROUP_RANK": str(rank // per_node),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(per_node),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # never opened: the ranks meet in a file
        "TORCHELASTIC_RUN_ID": "benchmarks",
        "TOKENIZERS_PARALLELISM": "false",
        **({"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}),
        **node.environment,
    }
    with (folder / f"output-{rank}").open("wb") as output:
        command = [*node.prefix, sys.executable, "-m", "benchmarks.rank", str(folder)]
        return subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)


def _wait(ranks: "list[subprocess.Popen[bytes]]", folder: Path, timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while any(rank.poll() is None for rank in ranks):
        failed = next((i for i, rank in enumerate(ranks) if rank.poll()), None)
        if failed is not None:
            raise RuntimeError(f"rank {failed} failed:\n{_output(folder, failed)}")
        if time.monotonic() > until:
            raise RuntimeError(f"The ranks did not finish within {timeout_s:g} s. Rank 0:\n{_output(folder, 0)}")
        time.sleep(0.02)
    failed = next((i for i, rank in enumerate(ranks) if rank.returncode), None)
    if failed is not None:
        raise RuntimeError(f"rank {failed} failed:\n{_output(folder, failed)}")


def _output(folder: Path, rank: int) -> str:
    return (folder / f"output-{rank}").read_text(errors="replace")[-6000:]


def _end(rank: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError):  # the rank and what it started; gone already where it ended well
        os.killpg(rank.pid, signal.SIGKILL)
    rank.wait()
