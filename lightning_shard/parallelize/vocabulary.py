"""The vocabulary split over tensor-parallel ranks: rows of the embedding's table, and the head's logits.

Rank i of n holds rows i V/n to (i+1) V/n of both, so that a table they share is one tensor. A look-up takes the rows that
are here, zeros for the others, and sums: exact in every type, since all terms but one are zero. The head's parts of the
logits are joined, or stay apart for a loss that knows how to read them.

What travels for T tokens of width h: an all-reduce of T h for the look-up, one of T h for the gradient of the head's input
(and one of T r for an adapter of rank r on it), and an all-gather of T V logits, or of 2 n T numbers in FP32 for a loss in
parts. Joined logits are whole on every rank, as if the head were; each rank holds and computes 1/n of the rest.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from lightning_shard._compat import is_peft_wrapper
from lightning_shard.blocks import find_embedding, find_head
from lightning_shard.parallelize.summed import join, stack, sum_over


def vocabulary_layers(model: Any, tp: int) -> tuple[nn.Module | None, nn.Module | None]:
    """The embedding and the head that ``tp`` ranks split, in an adapter's wrapper or not; None for what stays whole.

    Whole stay tables whose rows ``tp`` does not divide, and a head whose rows are not the embedding's
    (:func:`lightning_shard.specs.split.split_vocabulary` says the same of a spec).

    Raises:
        ValueError: for an embedding or head that computes with more than its own rows.
    """
    embedding, head = (found and found[1] for found in (find_embedding(model), find_head(model)))
    tables, heads = inner_layers(embedding), inner_layers(head)
    if not tables or tables[0].weight.shape[0] % tp:
        return None, None
    for layer in tables:
        _require_plain_table(layer, model)
    if not heads or heads[0].weight.shape[0] != tables[0].weight.shape[0]:
        return embedding, None
    for layer in heads:
        _require_plain_head(layer, model)
    return embedding, head


def inner_layers(layer: Any) -> list[Any]:
    """The layers that peft's wrapper may call in the place of ``layer``: itself where it is none."""
    if layer is None:
        return []
    if hasattr(layer, "trainable_tokens_delta") or hasattr(layer, "token_adapter"):
        raise ValueError(
            "trainable_token_indices reads the embedding's whole table, which tensor parallelism would split. Use "
            "modules_to_save for the embedding, or tp=1."
        )
    if not is_peft_wrapper(layer):
        return [layer]
    if hasattr(layer, "original_module"):
        return [layer.original_module, *layer.modules_to_save.values()]
    return inner_layers(layer.base_layer)


def _require_plain_table(layer: nn.Module, model: nn.Module) -> None:
    if not isinstance(layer, nn.Embedding) or layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
        raise ValueError(
            f"The embedding of {type(model).__name__} ({layer}) is more than a look-up, which tp does not split. Use tp=1."
        )


def _require_plain_head(layer: nn.Module, model: nn.Module) -> None:
    if not isinstance(layer, nn.Linear) or type(layer).forward is not nn.Linear.forward:
        raise ValueError(
            f"The head of {type(model).__name__} ({layer}) is more than a linear layer, which tp does not split. Use tp=1."
        )


def look_up_in_parts(layer: nn.Module, group: dist.ProcessGroup) -> None:
    """Hooks for an ``nn.Embedding`` whose weight is shadowed by this rank's rows of it: its output is the whole table's."""
    table: Any = layer
    calls: list[tuple[Tensor, Any]] = []
    total = table.weight.shape[0]
    num_rows = total // dist.get_world_size(group)
    first = num_rows * dist.get_rank(group)

    def before(_: nn.Module, args: Any) -> Any:
        ids, *rest = args
        # An id that no rank holds is left as it is: looking it up fails, on all ranks.
        elsewhere = ((ids >= 0) & (ids < first)) | ((ids >= first + num_rows) & (ids < total))
        calls.append((elsewhere, table.padding_idx))
        is_here = table.padding_idx is not None and first <= table.padding_idx < first + num_rows
        table.padding_idx = table.padding_idx - first if is_here else None
        return ((ids - first).masked_fill(elsewhere, 0), *rest)

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        elsewhere, table.padding_idx = calls.pop()
        return None if output is None else sum_over(output.masked_fill(elsewhere.unsqueeze(-1), 0), group)

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after, always_call=True)


class SplitHead:
    """A head whose logits lie in parts, (..., V/n) on each of n ranks; its callers get them joined.

    Args:
        layer: what the model calls as its head, in an adapter's wrapper or not.
        group: the ranks that share it.
    """

    def __init__(self, layer: nn.Module, group: dist.ProcessGroup) -> None:
        self._group = group
        self._apart = False
        layer.register_forward_hook(self._after)
        _HEADS[layer] = self

    def _after(self, _: nn.Module, __: Any, output: Any) -> Any:
        return output if self._apart else join(output, self._group)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside, calls of the head return this rank's part."""
        self._apart = True
        try:
            yield
        finally:
            self._apart = False

    def columns(self, targets: Tensor, num_columns: int) -> tuple[Tensor, Tensor]:
        """Where each target's logit is in this rank's part, 0 for those that another holds, and which are here."""
        local = targets - num_columns * dist.get_rank(self._group)
        here = (local >= 0) & (local < num_columns)
        return local.masked_fill(~here, 0), here

    def over_all(self, log_sum: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
        """From each part's log-sum-exp and the targets' logits in it (0 for others): those of the whole, same shapes."""
        if not log_sum.numel():
            return log_sum, picked
        parts = stack(torch.stack([log_sum, picked]), self._group)
        return parts[:, 0].logsumexp(0), parts[:, 1].sum(0)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The sum of the cross-entropy of ``targets``, (tokens,), given this rank's part of the logits, (tokens, V/n)."""
        total: Tensor = _SplitLoss.apply(logits, targets, self)  # type: ignore[no-untyped-call]
        return total


_HEADS: WeakKeyDictionary[nn.Module, SplitHead] = WeakKeyDictionary()
"""By layer and beside it: what is written down with a module, or copied, holds no process group."""


def split_head(layer: nn.Module) -> SplitHead | None:
    """How ``layer`` is split, where it is a head that tensor-parallel ranks share."""
    return _HEADS.get(layer)


class _SplitLoss(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, logits: Tensor, targets: Tensor, head: SplitHead) -> Tensor:
        columns, here = head.columns(targets, logits.shape[-1])
        picked = logits.gather(1, columns[:, None])[:, 0].masked_fill(~here, 0.0)
        log_sum, picked = head.over_all(logits.logsumexp(-1), picked)
        ctx.save_for_backward(logits, log_sum, columns, here)
        return (log_sum - picked).sum()

    @staticmethod
    @override
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        logits, log_sum, columns, here = ctx.saved_tensors
        gradient = (logits - log_sum[:, None]).exp_()
        gradient.scatter_add_(1, columns[:, None], -here[:, None].to(gradient.dtype))
        return gradient.mul_(grad_loss), None, None
