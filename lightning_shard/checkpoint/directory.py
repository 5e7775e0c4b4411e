"""A checkpoint as a folder that every rank writes its part of, and any number of ranks in any layout reads.

::

    step=100.ckpt/
        manifest.json   format version; size and SHA-256 of every other file; written last
        plan.json       the Plan that was in force
        trainer.pt      loops, schedulers, hyper-parameters, callbacks, random state per rank
        state/          torch.distributed.checkpoint: model/NAME and optimizer/I/NAME/KEY; current/NAME is what trains
                        where model/NAME is an average of it
        adapter/        a PEFT folder, where the model has adapters
"""

import contextlib
import io
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shard.checkpoint.atomic import commit, partial_path, remove, remove_abandoned
from lightning_shard.checkpoint.errors import CheckpointError
from lightning_shard.checkpoint.manifest import Stamp, read_manifest, require_whole, say_newest, stamp, write_manifest
from lightning_shard.checkpoint.remote import AnyPath
from lightning_shard.checkpoint.storage import StoredTensors, write_synced, write_tensors
from lightning_shard.parallelize.together import gather, on_all_ranks, rank_in

STATE, TRAINER, PLAN = "state", "trainer.pt", "plan.json"


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What goes into a checkpoint."""

    tensors: Mapping[str, Tensor]
    """By name; every rank gives its own shards. A plain tensor is written by the ranks that give it, once."""
    trainer: bytes
    """The rest, as :func:`to_bytes` made it; of the first rank only."""
    plan: Mapping[str, Any]
    """Fields of the plan."""
    write_more: Callable[[Path], None] | None = None
    """Called on the first rank to write further files into the folder."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """An open checkpoint, found whole."""

    path: AnyPath
    """Where its files lie."""
    trainer: dict[str, Any]
    """Everything but the tensors of model and optimizers."""
    tensors: StoredTensors = field(repr=False)

    @property
    def folder(self) -> Path:
        """Where its files lie, for one of this machine."""
        assert isinstance(self.path, Path)
        return self.path


def to_bytes(values: Mapping[str, Any]) -> bytes:
    """A snapshot of plain values and tensors as torch writes them."""
    stream = io.BytesIO()
    torch.save(dict(values), stream)
    return stream.getvalue()


def save_directory(contents: Contents, target: Path, group: dist.ProcessGroup | None = None) -> None:
    """Write a checkpoint that appears whole at ``target``, or not at all. Collective over ``group``.

    Raises:
        CheckpointError: on all ranks, when one of them could not write its part; nothing is left behind.
    """
    target = target.absolute()
    first = rank_in(group) == 0
    fresh = Path(gather(str(partial_path(target)) if first else None, group)[0])
    try:
        on_all_ranks(lambda: _prepare(fresh) if first else None, group)
        write_tensors(contents.tensors, fresh / STATE, group)
        stamps = on_all_ranks(lambda: _write_rest(contents, fresh, first, rank_in(group)), group)
        all_stamps = gather(stamps, group)
        on_all_ranks(lambda: _finish(fresh, target, all_stamps) if first else None, group)
    except Exception as error:
        if first:
            with contextlib.suppress(OSError):
                remove(fresh)
        raise CheckpointError(_write_failure(error, target)) from error


def open_directory(
    path: AnyPath, *, weights_only: bool | None, group: dist.ProcessGroup | None = None
) -> SavedCheckpoint:
    """Check every file of a checkpoint and open it. Collective over ``group``.

    Args:
        path: the folder, a link to it, or a place on remote storage.
        weights_only: False lets ``trainer.pt`` be unpickled with all that implies; None and True do not.
        group: who checks and opens.

    Raises:
        CheckpointError: on all ranks, naming the file that is damaged and the newest good checkpoint beside it.
        UnpicklingError: when it holds more than tensors and plain values and ``weights_only`` is not False.
    """
    require_whole(path, group)

    def read() -> SavedCheckpoint:
        root = read_manifest(path).root
        inside = path / root if root else path
        with (inside / TRAINER).open("rb") as stream:
            trainer = torch.load(stream, map_location="cpu", weights_only=weights_only is not False)
        return SavedCheckpoint(inside, trainer, StoredTensors(inside / STATE))

    return on_all_ranks(read, group)


def remove_directory(path: Path) -> None:
    """Remove a checkpoint: first from sight, in one moment, then its files."""
    if path.is_dir() and not path.is_symlink():
        hidden = partial_path(path)
        remove(hidden)
        os.rename(path, hidden)
        path = hidden
    remove(path)


def unpickling_remedy(path: AnyPath | str, strategy: str, error: UnpicklingError) -> str:
    """What to tell a user whose checkpoint needs more than ``weights_only=True`` gives."""
    return f"{path} holds more than tensors and plain values. If you trust it, pass {strategy}(weights_only=False). ({error})"


def _prepare(fresh: Path) -> None:
    fresh.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(fresh.parent)
    remove(fresh)
    (fresh / STATE).mkdir(parents=True)


def _write_rest(contents: Contents, fresh: Path, first: bool, rank: int) -> dict[str, Stamp]:
    """Stamps of the files that this rank wrote."""
    if not first:
        return _stamps(fresh, (fresh / STATE).glob(f"__{rank}_*"))
    write_synced(fresh / TRAINER, contents.trainer)
    write_synced(fresh / PLAN, json.dumps(dict(contents.plan), indent=1).encode())
    if contents.write_more is not None:
        contents.write_more(fresh)
    mine = [path for path in fresh.rglob("*") if path.is_file() and not _of_other_rank(path, rank)]
    for path in mine:
        _sync(path)
    return _stamps(fresh, mine)


def _of_other_rank(path: Path, rank: int) -> bool:
    return path.parent.name == STATE and path.name.startswith("__") and not path.name.startswith(f"__{rank}_")


def _stamps(fresh: Path, files: Any) -> dict[str, Stamp]:
    return {path.relative_to(fresh).as_posix(): stamp(path) for path in files}


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _finish(fresh: Path, target: Path, stamps: list[dict[str, Stamp]]) -> None:
    write_manifest(fresh, {name: s for of_rank in stamps for name, s in of_rank.items()}, {})
    commit(fresh, target)


def _write_failure(error: Exception, target: Path) -> str:
    """One message for whatever went wrong while writing, with what is left to go on from."""
    room = f"Its file system has {shutil.disk_usage(target.parent).free} bytes free. " if target.parent.is_dir() else ""
    return (
        f"The checkpoint {target} was not written, and nothing of it was left behind: {error}. "
        f"{room}{say_newest(target.parent)}"
    )
