"""What the first steps did: gradients where they should be, and the module that made the first NaN."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.doctor.finding import Finding

ADAPTERS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector")
SHOWN = 5


class OutputWatch:
    """Notes, for each module's first output, whether it is finite. Reads nothing from the device until asked."""

    def __init__(self, module: nn.Module) -> None:
        self._largest: dict[str, Tensor] = {}
        self._handles = [
            part.register_forward_hook(self._hook(name or type(module).__name__))
            for name, part in module.named_modules()
            if not any(True for _ in part.children()) or name == ""
        ]

    def close(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def first_bad(self) -> str | None:
        """The module whose output was the first with a NaN or an infinity; None where all were finite."""
        names, values = list(self._largest), list(self._largest.values())
        if not values:
            return None
        finite = torch.stack([torch.isfinite(v).to(values[0].device) for v in values]).tolist()
        return next((name for name, good in zip(names, finite, strict=True) if not good), None)

    def _hook(self, name: str) -> Any:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            tensor = _tensor(output)
            if name not in self._largest and tensor is not None and tensor.is_floating_point() and tensor.numel():
                # The largest magnitude: NaN and infinity pass through, and no mask of the output's size is made.
                self._largest[name] = torch.linalg.vector_norm(tensor.detach(), ord=float("inf"))

        return look


class GradientWatch:
    """Collects, over the first steps, which parameters got gradients and which of those were finite."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        """Trainable parameters that an optimizer stepped."""
        self.nonzero: set[str] = set()
        self.broken: list[str] = []
        """Parameters with NaN or infinite gradients, in the order of the module."""

    def look(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Read this rank's gradients; one wait for the device."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad and id(p) in held]
        self.seen |= {name for name, _ in named}
        grads = [(name, _local(p.grad)) for name, p in named if p.grad is not None]
        grads = [(name, grad) for name, grad in grads if grad.numel()]
        if not grads:
            return
        largest = [torch.linalg.vector_norm(grad.detach(), ord=float("inf")).float() for _, grad in grads]
        together = torch.stack([value.to(largest[0].device) for value in largest])
        for (name, _), value in zip(grads, together.tolist(), strict=True):
            if value != value or value == float("inf"):
                self.broken.append(name)
            if value:
                self.nonzero.add(name)


def check_finite(watch: GradientWatch, outputs: OutputWatch | None) -> Iterator[Finding]:
    """NaN or infinity in the first step, and where it came from."""
    if not watch.broken:
        return
    bad = outputs.first_bad() if outputs is not None else None
    if bad is not None:
        origin = f"The first output that was not finite was that of {bad}."
    elif outputs is not None:
        origin = (
            f"All outputs were finite: backward made it, and {watch.broken[-1]} is where it met the first parameter."
        )
    else:
        origin = "Outputs were not watched, since the blocks are compiled."
    yield Finding(
        level="error",
        check="NaN",
        what=f"{len(watch.broken)} of {len(watch.seen)} gradients are NaN or infinite in the first step. {origin}",
        why="The optimizer has written them into the weights.",
        fix="Look at that module's weights and at the batch; try precision='32-true', and a lower learning rate or warm-up.",
    )


def check_adapter_gradients(seen: set[str], nonzero: set[str]) -> Iterator[Finding]:
    """Adapters that no rank gave a gradient in the first steps."""
    adapters = sorted(name for name in seen if any(mark in name for mark in ADAPTERS))
    idle = [name for name in adapters if name not in nonzero]
    if idle:
        more = f" and {len(idle) - SHOWN} more" if len(idle) > SHOWN else ""
        yield Finding(
            level="warning",
            check="adapter gradients",
            what=f"{len(idle)} of {len(adapters)} adapter weights got no gradient in the first steps: {', '.join(idle[:SHOWN])}{more}.",
            why="They do not train.",
            fix="Use their modules in the loss; with re-entrant activation checkpointing call enable_input_require_grads(). "
            "Experts that no token was sent to, and steps with a learning rate of 0, show this too.",
        )


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return None if isinstance(output, DTensor) else output
    if isinstance(output, (list, tuple)):
        return next((found for value in output if (found := _tensor(value)) is not None), None)
    return None
