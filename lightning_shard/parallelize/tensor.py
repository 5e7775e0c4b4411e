"""Tensor parallelism for transformers' decoders: split where the model says, compute on plain local tensors.

Weights are stored as DTensors over the ``tp`` axis, so that sharding, clipping and checkpoints know their
layout; during a layer's forward each is shadowed by its local part. Two operations carry all traffic: one that
sums gradients where a replicated activation enters split columns, one that sums outputs where split rows end.
Layers the model's plan does not name are kept whole on every rank of the axis.
"""

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from typing_extensions import override

COLUMNS, ROWS, WHOLE, SUMMED = "colwise", "rowwise", "whole", "replicated_with_grad_allreduce"


class TensorParallel:
    """Splits one model's layers over ``mesh``; apply it to each unit before that is sharded.

    Args:
        root: the LightningModule; one transformers model with a tensor-parallel plan is looked for in it.
        mesh: one axis, inside a node.

    Raises:
        ValueError: when there is no such model, its plan needs what is not supported, or heads or sizes do
            not divide.
    """

    def __init__(self, root: nn.Module, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._styles: dict[int, str] = {}
        self.placed: dict[nn.Parameter, nn.Parameter] = {}
        """Each parameter that was there before, and the one that stands in its place."""
        self._done: set[int] = set()
        model = _model_with_plan(root)
        _require_divisible(model, mesh.size())
        # Embedding and head, outside the numbered blocks, are kept whole: FSDP shards them.
        plan = {pattern: style for pattern, style in model.tp_plan.items() if "*" in pattern}
        _require_known(model, plan)
        for name, layer in model.named_modules():
            style = next((s for pattern, s in plan.items() if _matches(pattern, name)), None)
            if style is not None:
                self._assign(name, layer, style)
        if not self._styles:
            raise ValueError(
                f"The tp_plan of {type(model).__name__} names no layer that it has. Use tp=1 and dp_shard."
            )

    def apply(self, unit: nn.Module) -> None:
        """Split the layers of ``unit`` that the plan names and keep the rest whole; layers done before are skipped."""
        for layer in unit.modules():
            if id(layer) not in self._done and any(True for _ in layer.parameters(recurse=False)):
                self._done.add(id(layer))
                style = self._styles.get(id(layer), WHOLE)
                self._place(layer, style)
                _compute_locally(layer, style, self._mesh.get_group())

    def _assign(self, name: str, layer: nn.Module, style: str) -> None:
        """Note a layer's style; an adapter on it splits so that its product has the layer's own layout."""
        if not hasattr(layer, "lora_A"):
            self._styles[id(layer)] = style
            return
        if len(layer.lora_magnitude_vector):  # type: ignore[arg-type]
            raise ValueError(
                f"{name} carries DoRA, whose norm runs over a whole weight: it cannot be split by tensor parallelism. Use "
                "method='lora', or tp=1."
            )
        self._styles[id(layer.base_layer)] = style
        first, second = (WHOLE, COLUMNS) if style == COLUMNS else (ROWS, WHOLE)
        self._styles.update({id(matrix): first for matrix in layer.lora_A.children()})  # type: ignore[union-attr,operator]
        self._styles.update({id(matrix): second for matrix in layer.lora_B.children()})  # type: ignore[union-attr,operator]

    def _place(self, layer: nn.Module, style: str) -> None:
        for name, parameter in list(layer._parameters.items()):
            if parameter is None:
                continue
            if parameter not in self.placed:
                placed = distribute_tensor(
                    parameter.detach().to(self._mesh.device_type),
                    self._mesh,
                    [_placement(style, name)],
                    src_data_rank=None,
                )
                self.placed[parameter] = nn.Parameter(placed, requires_grad=parameter.requires_grad)
            layer._parameters[name] = self.placed[parameter]


def _placement(style: str, name: str) -> Placement:
    if style == COLUMNS:
        return Shard(0)
    return Shard(1) if style == ROWS and name == "weight" else Replicate()


def _compute_locally(layer: nn.Module, style: str, group: dist.ProcessGroup) -> None:
    """Hooks that shadow the layer's DTensors by their local parts and sum what must be summed."""
    stack: list[dict[str, Any]] = []

    def before(_: nn.Module, args: Any) -> Any:
        outer: dict[str, Any] = {}
        for name, parameter in layer._parameters.items():
            if parameter is None:
                continue
            outer[name] = layer.__dict__.get(name)
            value = outer[name] if outer[name] is not None else parameter
            part = value.to_local() if isinstance(value, DTensor) else value
            layer.__dict__[name] = sum_gradient(part, group) if style == SUMMED else part
        if style == ROWS and outer.get("bias", 0) != 0:
            outer["after"] = layer.__dict__["bias"]
            layer.__dict__["bias"] = None  # added once, after the sum
        stack.append(outer)
        return (sum_gradient(args[0], group), *args[1:]) if style == COLUMNS else args

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        outer = stack.pop()
        for name in layer._parameters:
            layer.__dict__.pop(name, None)
            if outer.get(name) is not None:
                layer.__dict__[name] = outer[name]
        if style != ROWS or output is None:
            return output
        output = sum_over(output, group)
        return output if "after" not in outer else output + outer["after"]

    layer.register_forward_pre_hook(before)
    layer.register_forward_hook(after, always_call=True)


def sum_gradient(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The identity, whose gradient is summed over the group."""
    result: Tensor = _SumGradient.apply(value, group)  # type: ignore[no-untyped-call]
    return result


def sum_over(value: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the group; every rank's gradient is that of the sum."""
    result: Tensor = _Sum.apply(value, group)  # type: ignore[no-untyped-call]
    return result


class _SumGradient(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = value.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _model_with_plan(root: nn.Module) -> Any:
    for module in root.modules():
        # Of the class itself: peft's wrapper answers for the model inside it, whose names are not its own.
        if hasattr(type(module), "tp_plan") and module.tp_plan:
            return module
    raise ValueError(
        f"tp needs a transformers model that says how to split it (a tp_plan); {type(root).__name__} holds none. Use tp=1: "
        "dp_shard splits any module."
    )


def _require_known(model: nn.Module, plan: dict[str, str]) -> None:
    odd = sorted(set(plan.values()) - {COLUMNS, ROWS, SUMMED})
    if odd:
        raise ValueError(
            f"{type(model).__name__} asks for {', '.join(odd)} (fused projections or experts), which tp does not split. Use "
            "tp=1 and dp_shard."
        )


def _require_divisible(model: Any, tp: int) -> None:
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    counts = {
        "attention heads": heads,
        "key-value heads": getattr(config, "num_key_value_heads", None) or heads,
        "hidden size": config.hidden_size,
        "intermediate size": config.intermediate_size,
    }
    for what, count in counts.items():
        if count % tp:
            raise ValueError(
                f"tp={tp} does not divide the {count} {what} of {type(model).__name__}. Use a divisor of it."
            )


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None
