"""What lies in memory, by the names of the estimate's terms."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

AT_REST = ("frozen_weights", "trained_weights", "optimizer_state", "buffers")
"""Terms that stay the whole step and are measured tensor by tensor; the rest of the peak is in flight."""


def at_rest(module: nn.Module, optimizers: Iterable[Any], *, offload: str = "none") -> dict[str, int]:
    """Bytes of this rank's device at rest, and of gradients where there are any; tied tensors once.

    What the plan has wait in host memory (``offload``) is not the device's, also where the device is the host.
    """
    if offload != "none":
        optimizers = ()
    seen: set[Any] = set()
    states = [value for o in optimizers for state in o.state.values() for value in _tensors(state)]
    parameters = [p for p in module.parameters() if offload != "all" or not isinstance(p, DTensor)]
    return {
        "frozen_weights": _bytes((p for p in parameters if not p.requires_grad), seen),
        "trained_weights": _bytes((p for p in parameters if p.requires_grad), seen),
        "optimizer_state": _bytes(states, seen),
        "buffers": _bytes(module.buffers(), seen),
        "gradients": _bytes((p.grad for p in parameters if p.grad is not None), seen),
    }


def compare(rest: Mapping[str, int], peaks: Mapping[str, int | None], estimate: Mapping[str, Any]) -> list[list[Any]]:
    """Rows (term, estimated bytes or None, measured bytes or None); the names are the estimate's."""
    terms: Mapping[str, int] = estimate.get("terms", {})
    known = bool(terms)
    rows: list[list[Any]] = [[name, terms.get(name, 0) if known else None, rest[name]] for name in AT_REST]
    resting, allocated, reserved = (
        sum(rest[name] for name in AT_REST),
        peaks["allocated_bytes"],
        peaks["reserved_bytes"],
    )
    estimated_rest = sum(terms.get(name, 0) for name in AT_REST)
    in_flight = estimate["allocated_bytes"] - estimated_rest if known else None
    rows.append(["in flight at the peak", in_flight, None if allocated is None else allocated - resting])
    slack = terms.get("allocator_slack", 0) if known else None
    rows.append(["allocator_slack", slack, None if reserved is None or allocated is None else reserved - allocated])
    return [row for row in rows if row[1] or row[2]]


def peaks(device: torch.device) -> dict[str, int | None]:
    """This rank's peaks in bytes; None on a host, which keeps no such statistics."""
    if device.type != "cuda":
        return {"allocated_bytes": None, "reserved_bytes": None}
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(device),
        "reserved_bytes": torch.cuda.max_memory_reserved(device),
    }


def _bytes(tensors: Iterable[Tensor], seen: set[Any]) -> int:
    total = 0
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.is_meta or not local.numel() or local.data_ptr() in seen:
            continue
        seen.add(local.data_ptr())
        total += local.numel() * local.element_size()
    return total


def _tensors(state: Any) -> list[Tensor]:
    values = state.values() if isinstance(state, Mapping) else ()
    return [value for value in values if isinstance(value, Tensor)]
