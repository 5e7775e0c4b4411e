"""Meta tensors whose values lie in files: noted when the model is built, read once it is known what a rank keeps."""

import itertools

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.parallelize.together import gather, size_of
from lightning_shard.parallelize.weights import StoredTensor, fingerprint

_SOURCE = "_lightning_shard_source"
Places = list[tuple[nn.Module, str, StoredTensor]]
"""Module, name in it, and where the values lie."""


def note_source(tensor: Tensor, source: StoredTensor) -> None:
    """Say where a meta tensor's values lie."""
    tensor.__dict__[_SOURCE] = source


def source_of(tensor: Tensor) -> StoredTensor | None:
    """Where the values of ``tensor`` lie, while it is on the meta device."""
    source: StoredTensor | None = tensor.__dict__.get(_SOURCE) if tensor.is_meta else None
    return source


def require_same_files(places: Places) -> None:
    """Raise RuntimeError on all ranks unless they are about to read the same weights."""
    if size_of() == 1:
        return
    sources = [source for _, _, source in places]
    everyone = gather(fingerprint(sources))
    odd = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
    if odd:
        folders = ", ".join(sorted({str(source.file.parent) for source in sources})) or "none"
        raise RuntimeError(
            f"Rank {', '.join(map(str, odd))} would read other weights than rank 0 (this rank: {folders}). Give every node "
            "the same files."
        )


def find_places(root: nn.Module) -> Places:
    """Everything below ``root`` that waits for its values, by where it is: sharding exchanges the tensors themselves."""
    return [
        (module, name, source)
        for module in root.modules()
        for name, tensor in itertools.chain(module._parameters.items(), module._buffers.items())
        if tensor is not None and (source := source_of(tensor)) is not None
    ]


@torch.no_grad()
def stream_in(places: Places, device: torch.device) -> int:
    """Read what is still on the meta device: each rank its shards, and whole what is not sharded.

    Every tensor stays the object it is, so that ties, FSDP and optimizers keep knowing it.

    Returns:
        The bytes this rank now holds of it.
    """
    held = 0
    for module, name, source in places:
        tensor = module._parameters.get(name, module._buffers.get(name))
        if tensor is None or not tensor.is_meta:
            continue
        real = torch.empty_like(tensor, device=device)
        part = real.to_local() if isinstance(real, DTensor) else real
        dim, first = _place(real)
        source.read_into(part, dim=dim, first=first)
        held += part.numel() * part.element_size()
        replace(tensor, real)
    return held


def replace(tensor: Tensor, real: Tensor) -> None:
    """Give the object ``tensor`` the contents of ``real``."""
    if isinstance(tensor, nn.Parameter):
        real = nn.Parameter(real, requires_grad=tensor.requires_grad)
    torch.utils.swap_tensors(tensor, real)  # type: ignore[no-untyped-call]


def _place(tensor: Tensor) -> tuple[int, int]:
    """The dim that is split over ranks, and where this rank's part begins: equal chunks, the last ones short or empty."""
    if isinstance(tensor, DTensor):
        for axis, placement in enumerate(tensor.placements):
            if placement.is_shard():
                dim: int = placement.dim  # type: ignore[attr-defined]
                chunk = -(-tensor.shape[dim] // tensor.device_mesh.size(axis))
                return dim, min(chunk * tensor.device_mesh.get_local_rank(axis), tensor.shape[dim])
    return 0, 0
