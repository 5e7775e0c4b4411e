"""Are the copies of what trains equal on all ranks that should hold the same."""

import hashlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.doctor.finding import Finding
from lightning_shard.parallelize.together import gather, size_of

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Prints = dict[tuple[str, tuple[int, ...]], int]
"""(name, place among the shards) to a number that changes when a bit does."""


def check_replicas(module: nn.Module, when: str) -> Iterator[Finding]:
    """Compare what trains over the ranks that hold the same part of it. A collective; the answer is the same everywhere.

    One short digest travels per rank; only where digests differ do the single tensors' numbers.
    """
    if size_of() == 1:
        return
    prints = fingerprints(module)
    if _agree(gather(_digests(prints))):
        return
    names = sorted({name for name, _ in _different(gather(prints))})
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    yield Finding(
        level="error",
        check="replicas",
        what=f"{len(names)} trainable parameters differ between ranks {when}: {shown}.",
        why="Ranks that hold different copies train different models; the loss may still fall.",
        fix="Do not change parameters on some ranks only; take optimizer steps through Lightning, and send losses backward "
        "with manual_backward under manual optimization.",
    )


def fingerprints(module: nn.Module) -> Prints:
    """Numbers of every trainable parameter of this rank; one wait for the device."""
    places: list[tuple[str, tuple[int, ...]]] = []
    sums: list[Tensor] = []
    for name, parameter in module.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if parameter.requires_grad and local.numel() and not local.is_meta:
            places.append((name, _place(parameter)))
            sums.append(_sum_of_bits(local.detach()))
    if not sums:
        return {}
    return dict(zip(places, torch.stack([s.to(sums[0].device) for s in sums]).tolist(), strict=True))


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Sum of the bits as integers: exact in any order, and NaN like any other value."""
    flat = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return flat.contiguous().view(INTEGERS[flat.element_size()]).sum(dtype=torch.int64)


def _place(parameter: Tensor) -> tuple[int, ...]:
    """This rank's coordinates along the mesh axes over which a parameter is cut; none for a whole one."""
    if not isinstance(parameter, DTensor):
        return ()
    coordinates: Sequence[int] = parameter.device_mesh.get_coordinate() or ()
    axes = zip(coordinates, parameter.placements, strict=True)
    return tuple(at for at, placement in axes if not placement.is_replicate())


def _digests(prints: Prints) -> dict[tuple[int, ...], str]:
    lines: dict[tuple[int, ...], list[str]] = {}
    for (name, place), value in prints.items():
        lines.setdefault(place, []).append(f"{name}={value}")
    return {place: hashlib.blake2b("\n".join(sorted(all_)).encode()).hexdigest()[:16] for place, all_ in lines.items()}


def _agree(digests: list[dict[tuple[int, ...], str]]) -> bool:
    seen: dict[tuple[int, ...], str] = {}
    return all(seen.setdefault(place, digest) == digest for one in digests for place, digest in one.items())


def _different(everyone: list[Prints]) -> Iterator[tuple[str, tuple[int, ...]]]:
    seen: Prints = {}
    for prints in everyone:
        for key, value in prints.items():
            if seen.setdefault(key, value) != value:
                yield key
