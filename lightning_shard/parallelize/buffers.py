"""Saved buffers (batch statistics) with one meaning under every layout: rank 0's, as under DDP."""

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn


class SharedBuffers:
    """Gives every rank rank 0's saved buffers; those that are not saved are constants and equal anyway."""

    def __init__(self, root: nn.Module) -> None:
        saved = root.state_dict().keys()
        self._places = [
            (module, name)
            for path, module in root.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and (f"{path}.{name}" if path else name) in saved
        ]

    def __bool__(self) -> bool:
        return bool(self._places)

    @torch.no_grad()
    def share(self) -> None:
        """One broadcast for each type of buffer."""
        by_type: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for module, name in self._places:
            buffer = module._buffers[name]
            if buffer is not None and buffer.numel():
                by_type[buffer.dtype].append(buffer)
        for buffers in by_type.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            dist.broadcast(flat, src=0)
            parts = torch.split(flat, [buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.copy_(part.view_as(buffer))
