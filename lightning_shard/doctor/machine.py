"""What a machine must have: files, shared memory, disk."""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from lightning_shard.doctor.finding import Finding
from lightning_shard.specs import format_bytes

SHARED_MEMORY = Path("/dev/shm")
FEW_FILES = 1024
"""Open files that a process with several data-loading workers and many ranks soon reaches."""
LITTLE_SHARED_BYTES = 128 * 2**20
"""Docker's default is 64 MiB, which one worker's batches fill."""
LITTLE_DISK_BYTES = 2**30


def check_files(num_workers: int = 1) -> Iterator[Finding]:
    """The limit on open files: every batch that a worker sends holds some."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_workers and soft != resource.RLIM_INFINITY and soft < FEW_FILES:
        yield Finding(
            level="warning",
            check="open files",
            what=f"This process may open {soft} files.",
            why="Every tensor that a data-loading worker sends holds one, and every connection to another rank too.",
            fix="Raise the limit: ulimit -n 65536, in the shell or job script that starts the run.",
        )


def check_shared_memory(num_workers: int = 1, folder: Path = SHARED_MEMORY) -> Iterator[Finding]:
    """Room in shared memory, through which workers send batches and NCCL talks inside a node."""
    if not num_workers or not folder.is_dir():
        return
    free = shutil.disk_usage(folder).free
    if free < LITTLE_SHARED_BYTES:
        yield Finding(
            level="warning",
            check="shared memory",
            what=f"{folder} has {format_bytes(free)} left.",
            why="Data-loading workers and NCCL exchange data there, and die with a bus error when it is full.",
            fix="In a container start it with --shm-size 8g or --ipc host; or use num_workers=0.",
        )


def check_disk(folder: Path, least_bytes: int = LITTLE_DISK_BYTES, wanted_bytes: int = 0) -> Iterator[Finding]:
    """Room for checkpoints: an error below what one needs at least, a warning below what all of them need."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if not os.access(existing, os.W_OK):
        yield Finding(
            level="error",
            check="disk",
            what=f"{existing} cannot be written to.",
            why="The run's results and checkpoints go there.",
            fix="Give another folder (default_root_dir, or dirpath of ModelCheckpoint).",
        )
    elif free < max(least_bytes, wanted_bytes):
        yield Finding(
            level="error" if free < least_bytes else "warning",
            check="disk",
            what=f"{existing} has {format_bytes(free)} left; checkpoints need {format_bytes(max(least_bytes, wanted_bytes))}.",
            why="A checkpoint that cannot be written ends the run, often hours after its start.",
            fix="Free space there, give another dirpath to ModelCheckpoint, or keep fewer (save_top_k).",
        )
