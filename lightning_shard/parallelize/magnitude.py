"""DoRA on split layers: the product m (W + s B A) x / ||W + s B A||, whose norm is taken from parts of the weights.

Of split columns a rank holds whole rows of W and their part of the magnitude m: each norm is its own. Of split rows, and of
a table, each holds a part of every one: squares are summed over the ranks, in FP32, once a forward. Norms are constants to
autograd, as peft has them.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def split_magnitudes(layer: Any, group: dist.ProcessGroup, *, sum_squares: bool) -> None:
    """Have the adapters with a magnitude of one peft layer compute from this rank's parts.

    Args:
        layer: what peft put around a linear layer or a table.
        group: the ranks that share it.
        sum_squares: whether each holds a part of every norm; otherwise norms of its own.
    """
    for name, vector in layer.lora_magnitude_vector.items():
        norms = _Norms(layer, name, group if sum_squares else None)
        vector.forward = _Linear(vector, norms) if name in layer.lora_A else _Table(vector, norms)


class _Norms:
    """||W + s B A|| of each of a linear layer's outputs, or of a table's columns."""

    def __init__(self, layer: Any, adapter: str, group: dist.ProcessGroup | None) -> None:
        self._layer, self._adapter, self._group = layer, adapter, group

    @torch.no_grad()
    def __call__(self, dtype: torch.dtype) -> Tensor:
        layer, scale = self._layer, self._layer.scaling[self._adapter]
        weight = _part(layer.get_base_layer().weight).to(dtype)
        if self._adapter in layer.lora_A:
            first, second = (_part(of[self._adapter].weight).to(dtype) for of in (layer.lora_A, layer.lora_B))
            weight, over = torch.addmm(weight, second, first, alpha=scale), 1
        else:
            tables = (layer.lora_embedding_A, layer.lora_embedding_B)
            first, second = (_part(of[self._adapter]).to(dtype) for of in tables)
            weight, over = torch.addmm(weight, self._rows(first, weight.shape[0]).T, second.T, alpha=scale), 0
        if self._group is None:
            norms: Tensor = torch.linalg.vector_norm(weight, dim=over)
            return norms
        squares = torch.linalg.vector_norm(weight, dim=over, dtype=torch.promote_types(dtype, torch.float32)).square_()
        dist.all_reduce(squares, group=self._group)
        total: Tensor = squares.sqrt_().to(dtype)
        return total

    def _rows(self, first: Tensor, num_rows: int) -> Tensor:
        """Of a table's first matrix, (r, rows), which is whole on every rank, the columns for the rows that are here."""
        return first if num_rows == first.shape[1] else first.narrow(1, num_rows * dist.get_rank(self._group), num_rows)


class _Linear:
    """In the place of the forward that peft gives a linear layer's magnitude."""

    def __init__(self, vector: Any, norms: _Norms) -> None:
        self._vector, self._norms = vector, norms

    def __call__(
        self,
        x: Tensor,
        *,
        lora_A: nn.Module,
        lora_B: nn.Module,
        scaling: float,
        base_layer: Any,
        base_result: Tensor | None = None,
        adapter_name: str = "default",
    ) -> Tensor:
        """What is added to the layer's own result; ``base_result`` is that, where the adapter's input is the layer's."""
        ratio = self._vector.weight / self._norms(x.dtype)
        base = base_layer(x.to(base_layer.weight.dtype)) if base_result is None else base_result
        if base_layer.bias is not None:
            base = base - _part(base_layer.bias)
        result: Tensor = (ratio - 1) * base + ratio * lora_B(lora_A(x)) * scaling
        return result


class _Table:
    """In the place of the forward that peft gives a table's magnitude."""

    def __init__(self, vector: Any, norms: _Norms) -> None:
        self._vector, self._norms = vector, norms

    def __call__(
        self,
        ids: Tensor,
        *,
        lora_A: Tensor,
        lora_B: Tensor,
        scaling: float,
        base_layer: nn.Module,
        embed_fn: Any,
        adapter_name: str = "default",
    ) -> tuple[Tensor, Tensor]:
        """By what the layer's own result is multiplied, and what is added to it."""
        ratio = self._vector.weight / self._norms(lora_A.dtype)
        return ratio, ratio * (embed_fn(ids, lora_A) @ lora_B) * scaling


def _part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
