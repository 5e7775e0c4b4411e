"""A checkpoint as one file, as Lightning writes it: whole tensors on the first rank, read by any layout."""

import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_shard.checkpoint.atomic import commit, partial_path, remove, remove_abandoned
from lightning_shard.checkpoint.errors import CheckpointError
from lightning_shard.checkpoint.module_state import whole
from lightning_shard.checkpoint.storage import write_synced
from lightning_shard.parallelize.together import gather, rank_in


def gather_values(values: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    """Values of a state dict as whole tensors on the host, where ``keep``; an empty dict elsewhere. Collective.

    Tensors are gathered one at a time; names that share one still do.
    """
    found: dict[int, Any] = {}
    result = {}
    for name, value in values.items():
        if id(value) not in found:
            found[id(value)] = whole(value, keep)
        result[name] = found[id(value)]
    return result if keep else {}


def gather_optimizer_state(state: Mapping[str, Any], *, keep: bool) -> dict[str, Any]:
    """A named optimizer state with whole tensors, where ``keep``; an empty dict elsewhere. Collective."""
    values = {name: gather_values(of_one, keep=keep) for name, of_one in state["state"].items()}
    return {**state, "state": values} if keep else {}


def write_file(data: bytes, target: Path) -> None:
    """Write a whole file that replaces ``target`` in one moment, and is on the disk then."""
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(target.parent)
    fresh = partial_path(target)
    try:
        write_synced(fresh, data)
        commit(fresh, target)
    finally:
        if os.path.lexists(fresh):
            remove(fresh)


def require_whole_file(file: Path, group: dist.ProcessGroup | None = None) -> None:
    """Raise CheckpointError on all ranks of ``group`` unless the archive is complete and its CRCs hold. Collective."""
    damage = next(filter(None, gather(_damage(file) if rank_in(group) == 0 else None, group)), None)
    if damage:
        raise CheckpointError(damage)


def _damage(file: Path) -> str | None:
    try:
        with file.open("rb") as stream:
            if stream.read(2) != b"PK":
                return None if stream.read(1) else f"{file} is truncated: it holds no checkpoint."
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        return f"{file} is truncated or altered: {error}. Load another checkpoint."
    return None if bad is None else f"{file} is altered: the CRC of its part {bad!r} is wrong. Load another checkpoint."
