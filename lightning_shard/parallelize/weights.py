"""Safetensors read in place: of each tensor only the bytes that this rank keeps, straight into where they stay.

Plain reads, no memory map: pages of a map count as the process's own, and a map of a whole file invites whole
tensors. Ranks of a node that read the same bytes read them from disk once; the others find them in the page cache.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

PIECE_BYTES = 16 * 2**20
"""Bytes that wait on the host on their way to another device."""
CAST_BYTES = 2**20
"""Bytes that wait on the host on their way to another type there: few enough to stay in a core's cache."""
MAX_HEADER_BYTES = 100_000_000
"""As the format's own reader allows."""
SAMPLE_BYTES = 4096
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""How transformers names a model's only file, and the index of several."""
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Where a tensor lies in a safetensors file."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Byte of the file at which its values begin."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * self.dtype.itemsize

    def read_into(self, target: Tensor, *, dim: int = 0, first: int = 0) -> None:
        """Fill ``target`` with the values from index ``first`` of ``dim`` on, cast to its type.

        Args:
            target: contiguous, on any device; as long as the whole in every other dim.
            dim: the dim in which it may hold only a part.
            first: where that part begins.
        """
        if not target.numel():
            return
        rows = prod(self.shape[:dim])
        row_numel = prod(self.shape[dim:])
        inner = prod(self.shape[dim + 1 :])
        count = target.numel() // rows
        with _opened(self.file) as file:
            if count == row_numel or rows == 1:
                self._stream(file, self.start + first * inner * self.dtype.itemsize, target.view(-1))
                return
            columns = target.view(rows, count)  # of rows that lie apart in the file
            for row in range(rows):
                offset = self.start + (row * row_numel + first * inner) * self.dtype.itemsize
                self._stream(file, offset, columns[row])

    def _stream(self, file: int, offset: int, target: Tensor) -> None:
        """Fill a flat ``target`` with consecutive values."""
        on_host = target.device.type == "cpu"
        if on_host and target.dtype == self.dtype:
            _read(file, offset, target, self)
            return
        piece_numel = min((CAST_BYTES if on_host else PIECE_BYTES) // self.dtype.itemsize, target.numel())
        piece = torch.empty(piece_numel, dtype=self.dtype)
        for begin in range(0, target.numel(), piece_numel):
            part = piece[: min(piece_numel, target.numel() - begin)]
            _read(file, offset + begin * self.dtype.itemsize, part, self)
            target[begin : begin + part.numel()].copy_(part)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[int]:
    number = os.open(file, os.O_RDONLY)
    try:
        yield number
    finally:
        os.close(number)


def _read(file: int, offset: int, target: Tensor, stored: StoredTensor) -> None:
    left = memoryview(target.detach().view(torch.uint8).numpy())  # type: ignore[arg-type]
    while left:
        count = os.preadv(file, [left], offset)
        if not count:
            raise ValueError(f"{stored.file} ended inside {stored.name!r}. Copy it again from where it came.")
        left, offset = left[count:], offset + count


def open_folder(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model folder's safetensors files, by name; only headers are read.

    Raises:
        ValueError: when there are none, a file is missing or broken, or a type is not known.
    """
    index = folder / INDEX
    if index.is_file():
        names = set(json.loads(index.read_text())["weight_map"].values())
        files = [folder / name for name in sorted(names)]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(
            f"{folder} holds no safetensors file, and only those can be read in parts. Load the model once with "
            "transformers and write it with save_pretrained()."
        )
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}, which its index names. Copy the whole folder again.")
    return {tensor.name: tensor for file in files for tensor in read_header(file)}


def read_header(file: Path) -> Iterator[StoredTensor]:
    """The tensors of one safetensors file.

    The format: 8 bytes little-endian, the length of a JSON header with each tensor's type, shape and place, then values.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise _broken(file, f"its header would take {length} of {size} bytes")
        try:
            header: dict[str, dict[str, Any]] = json.loads(opened.read(length))
        except ValueError as error:
            raise _broken(file, f"its header is not JSON ({error})") from error
    for name, about in header.items():
        if name == "__metadata__":
            continue
        if about["dtype"] not in DTYPES:
            raise ValueError(f"{name!r} in {file} is {about['dtype']}, which is not among {', '.join(DTYPES)}.")
        begin, end = about["data_offsets"]
        tensor = StoredTensor(
            file=file,
            name=name,
            dtype=DTYPES[about["dtype"]],
            shape=tuple(about["shape"]),
            start=8 + length + begin,
        )
        if end - begin != tensor.num_bytes or 8 + length + end > size:
            raise _broken(file, f"{name!r} would lie at bytes {begin} to {end} of {size - 8 - length}")
        yield tensor


def _broken(file: Path, what: str) -> ValueError:
    return ValueError(f"{file} is no whole safetensors file: {what}. Copy it again from where it came.")


def fingerprint(tensors: list[StoredTensor]) -> str:
    """A digest of names, types, shapes and a sample from the middle of every tensor, to tell two models apart."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in sorted(tensors, key=lambda each: each.name):
        digest.update(f"{tensor.name} {tensor.dtype} {tensor.shape}".encode())
        with _opened(tensor.file) as file:
            middle = tensor.start + tensor.num_bytes // 2
            digest.update(os.pread(file, min(SAMPLE_BYTES, tensor.num_bytes - tensor.num_bytes // 2), middle))
    return digest.hexdigest()
