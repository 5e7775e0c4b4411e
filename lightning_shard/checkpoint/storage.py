"""Tensors in files, by torch.distributed.checkpoint, with an index that is read without unpickling.

torch writes where each tensor lies into a pickle. Ours is JSON beside it, so that opening a checkpoint runs no
code; torch's own file stays, so that ``torch.distributed.checkpoint.load`` reads the folder without this package.
"""

import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from typing_extensions import override

from lightning_shard.checkpoint.errors import CheckpointError
from lightning_shard.checkpoint.remote import AnyPath, RemotePath

INDEX = "index.json"


def write_tensors(tensors: Mapping[str, Tensor], folder: AnyPath, group: dist.ProcessGroup | None) -> None:
    """Write this rank's part of ``tensors`` (plain ones whole, DTensors their shards). Collective over ``group``."""
    with _as_plain_errors():
        save(
            dict(tensors),
            storage_writer=_IndexedWriter(folder),
            planner=DefaultSavePlanner(flatten_state_dict=False),
            process_group=group,
            no_dist=not (dist.is_available() and dist.is_initialized()),
        )


@contextmanager
def _as_plain_errors() -> Iterator[None]:
    """One error that names the rank instead of torch's, which is no ``Exception``; and no word about single processes."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        raise CheckpointError(f"rank {rank}: {cause or type(cause).__name__}") from error


class _IndexedWriter(FileSystemWriter):
    """torch's writer, every local file fsynced, plus the index."""

    def __init__(self, folder: AnyPath) -> None:
        super().__init__(str(folder), sync_files=isinstance(folder, Path))
        self._folder = folder
        if isinstance(folder, RemotePath):
            self.fs, self.path = folder.layer(), folder.url

    @override
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        places = {result.index: result.storage_data for of_rank in results for result in of_rank}
        tensors = {
            name: _describe(name, stored, places)
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        write_whole(self._folder / INDEX, json.dumps({"tensors": tensors}).encode())


def _describe(name: str, stored: TensorStorageMetadata, places: Mapping[MetadataIndex, Any]) -> dict[str, Any]:
    chunks = []
    for chunk in stored.chunks:
        place = places[MetadataIndex(name, chunk.offsets)]
        where = {"file": place.relative_path, "at": place.offset, "bytes": place.length}
        chunks.append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), **where})
    return {"dtype": str(stored.properties.dtype).removeprefix("torch."), "size": list(stored.size), "chunks": chunks}


@dataclass(frozen=True)
class _Place:
    """Where a chunk lies, with the names by which torch's reader asks."""

    relative_path: str
    offset: int
    length: int
    transform_descriptors: tuple[str, ...] = ()


class StoredTensors(FileSystemReader):
    """Reads what :func:`write_tensors` wrote, any part on any rank.

    Raises:
        CheckpointError: when the index is damaged or names a file outside the folder.
    """

    def __init__(self, folder: AnyPath) -> None:
        super().__init__(str(folder))
        if isinstance(folder, RemotePath):
            self.fs, self.path = folder.layer(), folder.url
        self._index = folder / INDEX
        self._stored = _read_index(self._index)

    @property
    def names(self) -> set[str]:
        """Every tensor in the folder."""
        return set(self._stored)

    def size(self, name: str) -> torch.Size:
        """Shape of the whole tensor."""
        return torch.Size(self._stored[name]["size"])

    def dtype(self, name: str) -> torch.dtype:
        """Type it was stored in."""
        dtype = getattr(torch, self._stored[name]["dtype"])
        assert isinstance(dtype, torch.dtype)
        return dtype

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill ``tensors`` (plain or DTensor, of the stored shapes) in place. Not collective.

        Raises:
            CheckpointError: where a shape differs, or a file cannot be read.
        """
        if tensors:
            planner = DefaultLoadPlanner(flatten_state_dict=False)
            with _as_plain_errors():
                load(dict(tensors), storage_reader=self, planner=planner, no_dist=True)

    def read_whole(self, name: str) -> Tensor:
        """One tensor, whole, on the CPU."""
        whole = torch.empty(self.size(name), dtype=self.dtype(name))
        self.read_into({name: whole})
        return whole

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        described: dict[str, Any] = {}
        places: dict[MetadataIndex, _Place] = {}
        for name, stored in self._stored.items():
            chunks = [ChunkStorageMetadata(torch.Size(c["offsets"]), torch.Size(c["sizes"])) for c in stored["chunks"]]
            described[name] = TensorStorageMetadata(TensorProperties(self.dtype(name)), self.size(name), chunks)
            for chunk in stored["chunks"]:
                places[MetadataIndex(name, chunk["offsets"])] = _Place(chunk["file"], chunk["at"], chunk["bytes"])
        return Metadata(described, storage_data=places, storage_meta=StorageMeta())


def _read_index(file: AnyPath) -> dict[str, Any]:
    try:
        stored: dict[str, Any] = json.loads(file.read_bytes())["tensors"]
        files = {chunk["file"] for tensor in stored.values() for chunk in tensor["chunks"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is missing or damaged: {error}. Load another checkpoint.") from error
    require_inside(file, files)
    return stored


def require_inside(index: AnyPath, names: Iterable[str]) -> None:
    """Raise CheckpointError where ``index`` names a file that would not lie below its own folder."""
    for name in names:
        path = PurePosixPath(name)
        if not name or "\\" in name or path.is_absolute() or ".." in path.parts:
            raise CheckpointError(
                f"{index} names the file {name!r}, outside of its own folder. It was not written by this package: do not "
                "load it."
            )


def write_whole(file: AnyPath, data: bytes) -> None:
    """Write a whole file; a remote one replaces an older one in one moment."""
    if isinstance(file, RemotePath):
        file.write_whole(data)
    else:
        write_synced(file, data)


def write_synced(file: Path, data: bytes) -> None:
    """Write a whole file and have it on the disk when this returns."""
    with file.open("wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
