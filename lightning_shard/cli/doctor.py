"""``lightning-shard doctor``: is this machine, and are these ranks, ready for a run."""

import argparse
import json
import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_shard.doctor.finding import Finding, agree
from lightning_shard.doctor.machine import check_disk, check_files, check_shared_memory

READY, NOT_READY = 0, 1


def main(argv: list[str]) -> int:
    """Examine and print; 1 when something would waste a run."""
    parser = argparse.ArgumentParser(
        prog="lightning-shard doctor",
        description="Check limits, shared memory, disk, devices, and whether all ranks answer: those that torchrun "
        "started, or one per device of this machine.",
    )
    parser.add_argument("--folder", default=".", help="where checkpoints will go (default: here)")
    parser.add_argument("--devices", type=int, help="processes to start (default: one per accelerator, two on a host)")
    parser.add_argument("--ping-timeout", type=float, default=30.0, metavar="SECONDS", help="to wait for a rank")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    arguments = parser.parse_args(argv)
    if arguments.ping_timeout <= 0:
        raise ValueError(f"--ping-timeout {arguments.ping_timeout:g} is a number of seconds above 0.")
    found = _examine(arguments)
    if found is None:  # another rank of a launched job speaks
        return READY
    _show(found, as_json=arguments.json)
    return NOT_READY if any(finding.level == "error" for finding in found) else READY


def _examine(arguments: argparse.Namespace) -> list[Finding] | None:
    if "WORLD_SIZE" in os.environ:
        return _rank(int(os.environ.get("LOCAL_RANK", "0")), arguments.folder, arguments.ping_timeout, {})
    count = arguments.devices or _num_devices()
    if count < 2:
        return list(_machine(arguments.folder))
    from torch.multiprocessing.spawn import spawn

    with tempfile.TemporaryDirectory() as meeting:
        spawn(_started, args=(count, meeting, arguments.folder, arguments.ping_timeout), nprocs=count)  # type: ignore[no-untyped-call]
        rows = json.loads((Path(meeting) / "findings.json").read_text())
    return [Finding(**{**row, "ranks": tuple(row["ranks"])}) for row in rows]


def _machine(folder: str) -> list[Finding]:
    return [*check_files(), *check_shared_memory(), *check_disk(Path(folder))]


def _started(rank: int, count: int, meeting: str, folder: str, timeout_s: float) -> None:
    found = _rank(
        rank, folder, timeout_s, {"init_method": f"file://{meeting}/store", "rank": rank, "world_size": count}
    )
    if found is not None:
        (Path(meeting) / "findings.json").write_text(json.dumps([finding.to_dict() for finding in found]))


def _rank(local_rank: int, folder: str, timeout_s: float, meet: dict[str, Any]) -> list[Finding] | None:
    """Findings of all ranks on the first; None on the others."""
    import torch
    import torch.distributed as dist

    from lightning_shard.doctor.ping import check_ping

    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    wait = timedelta(seconds=2 * timeout_s)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=wait, **meet)
    found = list(check_ping(device, timeout_s))
    first = dist.get_rank() == 0
    if not found:  # else nothing more can be said to each other
        found = agree(_machine(folder))
        dist.destroy_process_group()
    return found if first else None


def _num_devices() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 2


def _show(found: list[Finding], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"ready": all(f.level != "error" for f in found), "findings": [f.to_dict() for f in found]}))
        return
    for finding in found:
        print(f"{finding.level.upper()}: {finding}")
    print("Nothing found: this machine is ready." if not found else f"{len(found)} found.")
