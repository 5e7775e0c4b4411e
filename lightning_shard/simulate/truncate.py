"""The same module with fewer blocks, where all of them are alike."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from lightning_shard.blocks import find_blocks
from lightning_shard.plans import Plan


def num_blocks(root: nn.Module) -> int:
    """Blocks of a module."""
    return len(find_blocks(root))


def can_truncate(root: nn.Module, plan: Plan) -> bool:
    """Whether memory can be linear in the number of blocks: one list of equal blocks, treated alike by the plan."""
    blocks = find_blocks(root)
    if len({name.rpartition(".")[0] for name, _ in blocks}) != 1 or not isinstance(_container(root), nn.ModuleList):
        return False
    if plan.resident_blocks not in (0, ()) or plan.activation_checkpoint_blocks is not None:
        return False
    first = list(_description(blocks[0][1]))
    return all(list(_description(block)) == first for _, block in blocks[1:])


def truncate(root: nn.Module, count: int) -> None:
    """Keep the first ``count`` blocks."""
    container: Any = _container(root)
    del container[count:]


def _container(root: nn.Module) -> nn.Module:
    return root.get_submodule(find_blocks(root)[0][0].rpartition(".")[0])


def _description(block: nn.Module) -> Iterator[object]:
    """Everything about a block that could make it need other memory than its neighbour; its number does not."""
    for name, part in block.named_modules():
        yield name, type(part)
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            yield key, None if tensor is None else (tensor.shape, tensor.dtype, tensor.requires_grad)
        for key, value in sorted(vars(part).items()):
            if isinstance(value, (bool, int, float, str)) and "idx" not in key and "index" not in key:
                yield key, value
