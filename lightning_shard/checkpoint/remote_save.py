"""A checkpoint folder on remote storage, which has no folder to rename but replaces one file in one moment.

::

    s3://bucket/last.ckpt/
        manifest.json        written last; names the part that counts
        part-3f0a.../        plan.json, trainer.pt, state/, adapter/ as in a local folder

A save writes a part of its own, then the manifest, then removes the part before. Whoever is killed, the manifest names a
part that is whole.
"""

import contextlib
import json
import logging
import tempfile
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist

from lightning_shard.checkpoint.directory import PLAN, STATE, TRAINER, Contents
from lightning_shard.checkpoint.errors import CheckpointError
from lightning_shard.checkpoint.manifest import MANIFEST, Stamp, say_newest, stamp, write_manifest
from lightning_shard.checkpoint.remote import RemotePath
from lightning_shard.checkpoint.storage import write_tensors
from lightning_shard.parallelize.together import gather, on_all_ranks, rank_in

PART = "part-"
log = logging.getLogger(__name__)


def save_remote(contents: Contents, target: RemotePath, group: dist.ProcessGroup | None = None) -> None:
    """Write a checkpoint that appears whole at ``target``, or not at all. Collective over ``group``.

    Raises:
        CheckpointError: on all ranks, when one of them could not write its part; an older checkpoint at ``target`` stays.
    """
    rank = rank_in(group)
    name = gather(f"{PART}{uuid.uuid4().hex[:12]}" if rank == 0 else "", group)[0]
    fresh = target / name
    try:
        write_tensors(contents.tensors, fresh / STATE, group)
        stamps = on_all_ranks(lambda: _write_rest(contents, fresh, rank), group)
        every = {f"{name}/{file}": found for of_rank in gather(stamps, group) for file, found in of_rank.items()}
        extra = {"root": name, "saved_s": time.time()}
        on_all_ranks(lambda: write_manifest(target, every, extra) if rank == 0 else None, group)
    except Exception as error:
        if rank == 0:
            with contextlib.suppress(Exception):  # the storage that failed may fail here too
                fresh.remove()
        raise CheckpointError(_write_failure(error, target)) from error
    if rank == 0:
        _remove_others(target, name)


def remove_remote(target: RemotePath) -> None:
    """Remove a checkpoint: first its manifest, without which it is none, then its files."""
    (target / MANIFEST).remove()
    target.remove()


def _write_rest(contents: Contents, fresh: RemotePath, rank: int) -> dict[str, Stamp]:
    """Write what is not tensors, on the first rank; stamps of the files that this rank wrote."""
    written = [f"{STATE}/{path.name}" for path in (fresh / STATE).iterdir() if _is_mine(path.name, rank)]
    if rank == 0:
        written += put_all(partial(_write_small, contents), fresh)
    return {relative: stamp(fresh / relative) for relative in written}


def _write_small(contents: Contents, folder: Path) -> None:
    (folder / TRAINER).write_bytes(contents.trainer)
    (folder / PLAN).write_text(json.dumps(dict(contents.plan), indent=1))
    if contents.write_more is not None:
        contents.write_more(folder)


def put_all(write: Callable[[Path], None], target: RemotePath) -> list[str]:
    """Have ``write`` fill a local folder, and copy its files below ``target``; their names."""
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as name:
        folder = Path(name)
        write(folder)
        files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
        for relative, file in files.items():
            (target / relative).put(file)
        return list(files)


def _is_mine(name: str, rank: int) -> bool:
    return name.startswith(f"__{rank}_") or (rank == 0 and not name.startswith("__"))


def _remove_others(target: RemotePath, name: str) -> None:
    """Remove the parts that no manifest names any more: of the checkpoint before, and of killed saves."""
    try:
        for path in target.iterdir():
            if path.name.startswith(PART) and path.name != name:
                path.remove()
    except Exception as error:
        log.warning(f"The checkpoint {target} is complete, but an older part of it could not be removed: {error}")


def _write_failure(error: Exception, target: RemotePath) -> str:
    kept = ""
    with contextlib.suppress(Exception):  # the storage may be what failed
        kept = say_newest(target.parent)
    return f"The checkpoint {target} was not written: {error}. {kept}"
