"""FLOPs of a token and the device's peak, for MFU where no estimate says them."""

import torch
from torch import nn

from lightning_shard.hardware import find_device


def flops_per_token(module: nn.Module) -> int:
    """2 per weight forward, 2 for the gradient of the input, 2 more for that of the weight where it trains.

    Of matrices alone, look-up tables left out: 6 PT in full, 4 PT with adapters. Attention scores are not counted, so
    this is a little low for long sequences.
    """
    heads = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Linear)}  # a tied one multiplies
    tables = {id(layer.weight) for layer in module.modules() if isinstance(layer, nn.Embedding)} - heads
    matrices = [p for p in module.parameters() if p.dim() >= 2 and id(p) not in tables]
    return sum((6 if p.requires_grad else 4) * p.numel() for p in matrices)


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Dense peak of the device in the precision's compute type; None for a host or a device not in the table."""
    row = find_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if row is None:
        return None
    return row.flops_of("bfloat16" if precision.startswith(("bf16", "16")) else "float32")
