"""One start on every rank: compare fingerprints first, send only what differs."""

import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.parallelize.storage import packed_parts
from lightning_shard.parallelize.together import gather, size_of

CHUNK_BYTES = 64 * 2**20
ON_META = ", on meta"


def agree_on_start(module: nn.Module, device: torch.device) -> int:
    """Give every rank rank 0's parameters and buffers; returns the bytes that had to be sent.

    Ranks that read the same file or used the same seed hold equal tensors already: those cost one
    fingerprint each and no traffic. Sharded and meta tensors are left alone.

    Raises:
        RuntimeError: on all ranks, when the ranks built modules with different tensors.
    """
    if size_of() == 1:
        return 0
    tensors = _plain_tensors(module)
    mine = {name: (_describe(t), _fingerprint(t)) for name, t in tensors.items()}
    all_ranks = gather(mine)
    _require_same_tensors(all_ranks)
    sent = 0
    for name, tensor in tensors.items():
        if len({rank[name] for rank in all_ranks}) > 1:
            _receive(tensor, device)
            sent += tensor.numel() * tensor.element_size()
    return sent


def _describe(tensor: Tensor) -> str:
    trains = ", trains" if tensor.requires_grad else ""
    return (
        f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{trains}{ON_META if tensor.is_meta else ''}"
    )


def _plain_tensors(module: nn.Module) -> dict[str, Tensor]:
    named: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    plain = {name: t for name, t in named.items() if not isinstance(t, DTensor) and t.numel()}
    return {f"{name}{part}": t for name, whole in plain.items() for part, t in packed_parts(whole).items()}


def _fingerprint(tensor: Tensor) -> str:
    if tensor.is_meta:
        return ""
    digest = hashlib.blake2b(digest_size=16)
    flat = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
    for start in range(0, flat.numel(), CHUNK_BYTES):
        digest.update(flat[start : start + CHUNK_BYTES].cpu().numpy().data)
    return digest.hexdigest()


def _receive(tensor: Tensor, device: torch.device) -> None:
    buffer = tensor.detach().to(device).contiguous()
    dist.broadcast(buffer, src=0)
    with torch.no_grad():
        tensor.detach().copy_(buffer)


def _require_same_tensors(all_ranks: list[dict[str, tuple[str, str]]]) -> None:
    """Raise unless all ranks registered the same tensors, in the same order: collectives pair them by position."""
    told = [[(name, value[0]) for name, value in rank.items()] for rank in all_ranks]
    for rank, other in enumerate(told):
        if other == told[0]:
            continue
        ours, theirs = dict(told[0]), dict(other)
        names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        if not names:
            first = next(b[0] for a, b in zip(told[0], other, strict=True) if a != b)
            raise RuntimeError(
                f"Rank {rank} registered its parameters in another order than rank 0, from {first!r} on: gradients would be "
                "averaged with those of other parameters. Build modules in one order; do not iterate over a set."
            )
        if ON_META in f"{ours.get(names[0])}{theirs.get(names[0])}":
            raise RuntimeError(
                f"Rank {rank} and rank 0 loaded different weights: {names[0]!r} is {ours.get(names[0])} on rank 0 and "
                f"{theirs.get(names[0])} on rank {rank}. Build the module alike on every rank: lightning_shard.from_pretrained "
                "has each rank read just the bytes that it keeps."
            )
        raise RuntimeError(
            f"Rank {rank} built a different module from rank 0: {len(names)} parameters or buffers differ in name, shape, "
            f"type or whether they train, the first is {names[0]!r} (rank 0: {ours.get(names[0])}, rank {rank}: "
            f"{theirs.get(names[0])}). Every rank must build the same module: do not let the rank decide sizes, layers or "
            "what is frozen."
        )
