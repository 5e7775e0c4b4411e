"""What checkpoints ask of torch by private names."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor


def shard_offsets(tensor: torch.Tensor) -> list[tuple[int, ...]]:
    """Where in the whole tensor each piece of it on this rank begins.

    torch's checkpoints ask a DTensor by a method that is not in its reference; can go when the offsets of a shard are
    public.
    """
    pieces = getattr(tensor, "__create_chunk_list__", None)
    return [(0,) * tensor.dim()] if pieces is None else [tuple(piece.offsets) for piece in pieces()]


def copy_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory; of a DTensor a DTensor of the same layout, on whatever device its mesh is.

    The public way would put its shard back on the mesh's device, and torch's own stager copies three times. Can go when
    either changes.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach().to("cpu", copy=True)
    local = tensor.to_local().detach().to("cpu", copy=True)
    return DTensor(local, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call,no-any-return]


def fsspec_layer(url: str, options: Mapping[str, Any]) -> Any:
    """Torch's file layer over fsspec, for the folder at ``url``; ``options`` are the file system's.

    torch's writer and reader for it are in a private module, and take no layer that reads their index without a pickle. Can
    go when either changes.
    """
    from torch.distributed.checkpoint import _fsspec_filesystem

    layer = _fsspec_filesystem.FileSystem()
    layer.init_path(url, **options)
    return layer
