"""Places that are no folders of this machine: what checkpoints ask of a path, by fsspec.

An object store has no folders to rename, but one object appears whole or not at all. A remote checkpoint therefore keeps
its files in a part of its own, and its manifest, written last, names that part: see
:mod:`lightning_shard.checkpoint.remote_save`.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]
from typing_extensions import override

from lightning_shard._compat.storage import fsspec_layer


def is_remote(path: str | Path) -> bool:
    """Whether ``path`` names a place by a protocol, such as ``s3://``."""
    return "://" in str(path)


class RemotePath:
    """A file or folder at a URL, with the methods of :class:`pathlib.Path` that checkpoints use.

    Args:
        url: with its protocol; fsspec must know it.
        options: for the file system, as ``storage_options``.
    """

    def __init__(self, url: str, options: Mapping[str, Any] | None = None) -> None:
        self.url, self._options = url.rstrip("/"), dict(options or {})
        self._fs, self._inner = url_to_fs(self.url, **self._options)

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.url}/{name}", self._options)

    @override
    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> "RemotePath":
        """The folder it lies in."""
        return RemotePath(self.url.rpartition("/")[0], self._options)

    def layer(self) -> Any:
        """Torch's way to the same file system, for ``torch.distributed.checkpoint``."""
        return fsspec_layer(self.url, self._options)

    def open(self, mode: str = "rb") -> AbstractContextManager[IO[bytes]]:
        """The file as a stream."""
        stream: AbstractContextManager[IO[bytes]] = self._fs.open(self._inner, mode)
        return stream

    def read_bytes(self) -> bytes:
        """The whole file."""
        data: bytes = self._fs.cat_file(self._inner)
        return data

    def write_whole(self, data: bytes) -> None:
        """Write a file that appears whole, in place of an older one."""
        aside = f"{self._inner}.partial"
        self._fs.makedirs(self.parent._inner, exist_ok=True)
        self._fs.pipe_file(aside, data)
        self._fs.mv(aside, self._inner)

    def num_bytes(self) -> int:
        """Size of the file."""
        return int(self._fs.size(self._inner))

    def is_file(self) -> bool:
        """Whether a file is there now, whatever was listed before."""
        self._fs.invalidate_cache()
        return bool(self._fs.isfile(self._inner))

    def is_dir(self) -> bool:
        """Whether a folder is there now."""
        self._fs.invalidate_cache()
        return bool(self._fs.isdir(self._inner))

    def iterdir(self) -> Iterator["RemotePath"]:
        """What lies in the folder; nothing where there is none."""
        if self.is_dir():
            for found in self._fs.ls(self._inner, detail=False):
                yield self / str(found).rstrip("/").rpartition("/")[2]

    def put(self, file: Path) -> None:
        """Copy a local file to here."""
        self._fs.makedirs(self.parent._inner, exist_ok=True)
        self._fs.put_file(str(file), self._inner)

    def fetch(self, folder: Path) -> None:
        """Copy everything below to a local folder, which must not be there."""
        self._fs.get(self._inner, str(folder), recursive=True)

    def remove(self) -> None:
        """Remove a file, or a folder with all it holds, if it is there."""
        self._fs.invalidate_cache()
        if self._fs.exists(self._inner):
            self._fs.rm(self._inner, recursive=True)


AnyPath = Path | RemotePath
