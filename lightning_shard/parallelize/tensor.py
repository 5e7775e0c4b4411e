"""Tensor parallelism for transformers' decoders: split where the model says, compute on plain local tensors.

Weights are stored as DTensors over the ``tp`` axis, so that sharding, clipping and checkpoints know their
layout; during a layer's forward each is shadowed by its local part. Two operations carry all traffic: one that
sums gradients where a replicated activation enters split columns, one that sums outputs where split rows end.
Embedding and head are split along the vocabulary (:mod:`lightning_shard.parallelize.vocabulary`). Other layers that the
model's plan does not name are kept whole on every rank of the axis.
"""

import logging
import re
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from lightning_shard.parallelize.magnitude import split_magnitudes
from lightning_shard.parallelize.summed import sum_gradient, sum_over
from lightning_shard.parallelize.vocabulary import SplitHead, inner_layers, look_up_in_parts, vocabulary_layers

log = logging.getLogger(__name__)

COLUMNS, ROWS, WHOLE, SUMMED = "colwise", "rowwise", "whole", "replicated_with_grad_allreduce"
TABLE = "vocabulary"
"""Rows of a look-up table."""
ENTRIES = "entries"
"""Those of a vector that belong to split columns."""
VARIANTS = ("DoraLinearVariant", "DoraEmbeddingVariant")
"""What peft's adapters may compute beside ``B A x`` where a layer is split."""


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
        # The plan's words on embedding and head, outside the numbered blocks, differ by model; how they are split does not.
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
        self._split_vocabulary(model)
        self._callers = {id(part): module for module in root.modules() for part in module.children() if _is_list(part)}

    def apply(self, unit: nn.Module) -> None:
        """Split the layers of ``unit`` that the plan names and keep the rest whole; layers done before are skipped."""
        for layer in unit.modules():
            if id(layer) not in self._done and any(True for _ in layer.parameters(recurse=False)):
                self._done.add(id(layer))
                style = self._styles.get(id(layer), WHOLE)
                self._place(layer, style)
                group = self._mesh.get_group()
                _compute_locally(layer, style, group, self._callers.get(id(layer), layer))
                if style == TABLE:
                    look_up_in_parts(layer, group)
        for layer in unit.modules():
            if getattr(layer, "lora_magnitude_vector", None) and id(layer) not in self._done:
                self._done.add(id(layer))
                style = self._styles.get(id(layer.base_layer), WHOLE)
                split_magnitudes(layer, self._mesh.get_group(), sum_squares=style in (ROWS, TABLE))

    def _split_vocabulary(self, model: Any) -> None:
        embedding, head = vocabulary_layers(model, self._mesh.size())
        if embedding is None and self._mesh.get_rank() == 0:
            log.warning(
                "tp=%d does not divide the vocabulary of %s: embedding and head stay whole on every rank. Pad it to a multiple: "
                "model.resize_token_embeddings(pad_to_multiple_of=%d).",
                self._mesh.size(),
                type(model).__name__,
                self._mesh.size(),
            )
        for outer, style in ((embedding, TABLE), (head, COLUMNS)):
            for layer in [outer] if outer is not None and hasattr(outer, "lora_A") else inner_layers(outer):
                self._assign("The vocabulary's layer", layer, style)
        if head is not None:
            SplitHead(head, self._mesh.get_group())

    def _assign(self, name: str, layer: nn.Module, style: str) -> None:
        """Note a layer's style; an adapter on it splits so that its product has the layer's own layout."""
        if not hasattr(layer, "lora_A"):
            self._styles[id(layer)] = style
            return
        _require_known_variant(name, layer)
        self._styles[id(layer.base_layer)] = style
        # Of a table both are empty: peft keeps its adapter in lists beside them, which stay whole.
        first, second = (WHOLE, COLUMNS) if style == COLUMNS else (ROWS, WHOLE)
        self._styles.update({id(matrix): first for matrix in layer.lora_A.children()})  # type: ignore[union-attr,operator]
        self._styles.update({id(matrix): second for matrix in layer.lora_B.children()})  # type: ignore[union-attr,operator]
        magnitude = ENTRIES if style == COLUMNS else WHOLE
        self._styles.update({id(vector): magnitude for vector in layer.lora_magnitude_vector.children()})  # type: ignore[union-attr,operator]

    def _place(self, layer: nn.Module, style: str) -> None:
        for name, parameter in list(layer._parameters.items()):
            if parameter is None:
                continue
            where = [_placement(style, name)]
            if parameter not in self.placed:
                placed = distribute_tensor(
                    parameter.detach().to(self._mesh.device_type), self._mesh, where, src_data_rank=None
                )
                self.placed[parameter] = nn.Parameter(placed, requires_grad=parameter.requires_grad)
            if list(self.placed[parameter].placements) != where:  # type: ignore[attr-defined]
                raise ValueError(
                    f"A {type(layer).__name__} shares its {name} of shape {tuple(parameter.shape)} with a layer that tensor "
                    "parallelism splits otherwise. Untie the two, or use tp=1."
                )
            layer._parameters[name] = self.placed[parameter]


def _placement(style: str, name: str) -> Placement:
    if style in (COLUMNS, TABLE, ENTRIES):
        return Shard(0)
    return Shard(1) if style == ROWS and name == "weight" else Replicate()


def _is_list(module: nn.Module) -> bool:
    """Whether ``module`` only holds parameters for the module that it is in (peft's adapters of a table)."""
    return isinstance(module, (nn.ParameterDict, nn.ParameterList))


def _compute_locally(layer: nn.Module, style: str, group: dist.ProcessGroup, caller: nn.Module) -> None:
    """Hooks that shadow the layer's DTensors by their local parts and sum what must be summed; ``caller``: whose forward
    uses them, mostly the layer itself.
    """
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

    caller.register_forward_pre_hook(before)
    caller.register_forward_hook(after, always_call=True)


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


def _require_known_variant(name: str, layer: Any) -> None:
    odd = {type(variant).__name__ for variant in layer.lora_variant.values()} - {*VARIANTS}
    if hasattr(layer, "parameter_name"):
        odd.add("target_parameters")
    if odd:
        raise ValueError(
            f"{name} carries an adapter with {', '.join(sorted(odd))}, which tensor parallelism does not split. Use LoRA, "
            "rsLoRA or DoRA of whole layers, or tp=1."
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
