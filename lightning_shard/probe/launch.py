"""Start the ranks to probe, or join those that a launcher started."""

import os
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from lightning_shard.hardware.profile import LinkProfile
from lightning_shard.probe.measure import measure_links

TIMEOUT = timedelta(minutes=2)


def probe(num_local: int | None = None) -> LinkProfile | None:
    """Measure this cluster's links; None on every rank but the first of a launched job.

    Under a launcher that sets ``WORLD_SIZE`` (torchrun, on any number of nodes) the ranks are its own.
    Otherwise ``num_local`` processes of this machine are started: one per accelerator, or two on a host.

    Raises:
        ValueError: for fewer than two ranks: there is no link to measure.
    """
    if "WORLD_SIZE" in os.environ:
        return _join()
    count = num_local or (torch.cuda.device_count() if torch.cuda.is_available() else 2)
    if count < 2:
        raise ValueError(f"--devices {count}: a link has two ends. Probe two or more devices, or launch with torchrun.")
    with tempfile.TemporaryDirectory() as folder:
        spawn(_measure, args=(count, folder), nprocs=count)  # type: ignore[no-untyped-call]
        return LinkProfile.load(Path(folder) / "profile.json")


def _measure(rank: int, count: int, folder: str) -> None:
    device = _device(rank)
    dist.init_process_group(
        _backend(device), init_method=f"file://{folder}/store", rank=rank, world_size=count, timeout=TIMEOUT
    )
    profile = measure_links(count, device)
    if rank == 0:
        profile.save(Path(folder) / "profile.json")
    dist.destroy_process_group()


def _join() -> LinkProfile | None:
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    device = _device(local)
    dist.init_process_group(_backend(device), timeout=TIMEOUT)
    profile = measure_links(int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])), device)
    dist.destroy_process_group()
    return profile if rank == 0 else None


def _device(local_rank: int) -> torch.device:
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"
