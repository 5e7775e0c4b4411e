"""The list of a checkpoint's files with their sizes and SHA-256 sums: what makes it complete, and checkable.

``manifest.json`` is written last. A folder without it is no checkpoint; a file that does not match it is damaged.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lightning_shard.checkpoint.atomic import find_interrupted
from lightning_shard.checkpoint.errors import CheckpointError
from lightning_shard.checkpoint.remote import AnyPath, RemotePath
from lightning_shard.checkpoint.storage import require_inside, write_whole
from lightning_shard.parallelize.together import gather, rank_in, size_of

MANIFEST = "manifest.json"
FORMAT = "lightning-shard checkpoint"
VERSION = 1
"""Of the format. A version is read for as long as the package lives; tests keep a small checkpoint of each."""
CHUNK_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a file must look like."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint says of itself."""

    stamps: dict[str, Stamp]
    """By path below the checkpoint."""
    root: str = ""
    """Where below the checkpoint its files lie; on remote storage a part of their own."""
    saved_s: float = 0.0
    """When it was written, where the storage does not tell."""


def is_checkpoint(path: AnyPath) -> bool:
    """Whether a complete checkpoint of this package lies at ``path``."""
    return (path / MANIFEST).is_file()


def stamp(file: AnyPath) -> Stamp:
    """Size and SHA-256 of a file."""
    digest, size = hashlib.sha256(), 0
    with file.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return Stamp(size, digest.hexdigest())


def write_manifest(folder: AnyPath, stamps: dict[str, Stamp], extra: dict[str, Any]) -> None:
    """Write the manifest of ``folder``, which finishes it.

    Args:
        folder: holds all the files.
        stamps: by path below ``folder``.
        extra: more facts, as plain JSON values.
    """
    files = {name: {"bytes": s.num_bytes, "sha256": s.sha256} for name, s in sorted(stamps.items())}
    content = {"format": FORMAT, "version": VERSION, **extra, "files": files}
    write_whole(folder / MANIFEST, json.dumps({**content, "sha256": _own_sum(content)}, indent=1).encode())


def read_manifest(folder: AnyPath) -> Manifest:
    """The list of a checkpoint's files.

    Raises:
        CheckpointError: when it is not a checkpoint of this package, was written by a newer one, or is damaged.
    """
    file = folder / MANIFEST
    try:
        content = json.loads(file.read_bytes())
        if content.pop("sha256") != _own_sum(content):
            raise ValueError("its content does not match its own checksum")
        stamps = {name: Stamp(entry["bytes"], entry["sha256"]) for name, entry in content["files"].items()}
        known, version = content["format"] == FORMAT, int(content["version"])
        manifest = Manifest(stamps, str(content.get("root", "")), float(content.get("saved_s", 0)))
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}.") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}.") from error
    if not known or version > VERSION:
        raise CheckpointError(
            f"{folder} has format version {version}; this version of the package reads up to {VERSION}. Upgrade "
            "lightning-shard."
        )
    require_inside(file, [*stamps, *filter(None, [manifest.root])])
    return manifest


def find_damage(folder: AnyPath, group: dist.ProcessGroup | None = None) -> str | None:
    """What is wrong with the checkpoint, naming the file; None when every file is as it was written.

    Collective over ``group``: every rank checks a part of the files, and all learn the same.
    """
    damage = None
    try:
        names = read_manifest(folder).stamps
        for name, wanted in sorted(names.items())[rank_in(group) :: size_of(group)]:
            damage = damage or _compare(folder / name, wanted)
    except (CheckpointError, OSError) as error:
        damage = str(error)
    return next(filter(None, gather(damage, group)), None)


def require_whole(folder: AnyPath, group: dist.ProcessGroup | None = None) -> None:
    """Raise CheckpointError on all ranks of ``group`` when a file is missing or altered, and offer another."""
    damage = find_damage(folder, group)
    if damage is None:
        return
    offer = newest_whole(folder.parent, but=folder) if rank_in(group) == 0 else None
    offered = gather(None if offer is None else str(offer), group)[0]
    remedy = f"The newest good one beside it: ckpt_path={offered!r}." if offered else "There is no other beside it."
    raise CheckpointError(f"{damage} {remedy}")


def newest_whole(folder: AnyPath, but: AnyPath | None = None) -> AnyPath | None:
    """The newest undamaged checkpoint in ``folder``, other than ``but``; links are not followed."""
    others = (path for path in folder.iterdir() if str(path) != str(but))
    found = [path for path in others if not _is_link(path) and is_checkpoint(path)]
    found.sort(key=_saved_at, reverse=True)
    return next((path for path in found if _is_whole(path)), None)


def say_newest(folder: AnyPath) -> str:
    """A sentence on what is left in ``folder`` to go on from."""
    last = newest_whole(folder) if folder.is_dir() else None
    return f"The newest good checkpoint is {str(last)!r}." if last else "There is no other good checkpoint beside it."


def _is_link(path: AnyPath) -> bool:
    return isinstance(path, Path) and path.is_symlink()


def _saved_at(path: AnyPath) -> float:
    """When a checkpoint was written; 0 for one whose manifest is damaged."""
    if isinstance(path, Path):
        return (path / MANIFEST).stat().st_mtime_ns
    try:
        return read_manifest(path).saved_s
    except CheckpointError:
        return 0


def locate(path: Path) -> Path:
    """The checkpoint meant by ``path``: what a link points at, or what an interrupted exchange left aside."""
    return find_interrupted(path).resolve()


def _is_whole(folder: AnyPath) -> bool:
    try:
        return all(_compare(folder / name, wanted) is None for name, wanted in read_manifest(folder).stamps.items())
    except (CheckpointError, OSError):
        return False


def _compare(file: AnyPath, wanted: Stamp) -> str | None:
    if not file.is_file():
        return f"{file} is missing from the checkpoint."
    size = file.num_bytes() if isinstance(file, RemotePath) else file.stat().st_size
    if size != wanted.num_bytes:
        return f"{file} is truncated or altered: it has {size} bytes, {wanted.num_bytes} were written."
    if stamp(file) != wanted:
        return f"{file} is altered: its SHA-256 is not that of what was written."
    return None


def _own_sum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
