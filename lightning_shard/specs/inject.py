"""An adapter's tensors, added to a ModelSpec as peft would add them, without a model."""

import dataclasses
from collections.abc import Iterator

from lightning_shard.specs.adapter import ALL_LINEAR, AdapterSpec
from lightning_shard.specs.model import ModelSpec, TensorSpec, UnitSpec

LINEAR_OWNERS = ("Linear", "Conv1D", "NonDynamicallyQuantizableLinear")


def inject(model: ModelSpec, adapter: AdapterSpec) -> ModelSpec:
    """The model with adapter tensors beside every matched weight and the rest frozen."""
    if model.adapter is not None:
        raise ValueError("The model spec already has an adapter. Start from the spec of the base model.")
    targets, kept = set(_matches(model, adapter)), set(_saved(model, adapter))
    if not targets:
        raise ValueError(_nothing_matched(model, "target_modules", adapter.target_modules))
    if adapter.modules_to_save and not kept:
        raise ValueError(_nothing_matched(model, "modules_to_save", adapter.modules_to_save))
    units = tuple(
        dataclasses.replace(unit, tensors=tuple(_adapted(unit, adapter, targets, kept))) for unit in model.units
    )
    return dataclasses.replace(model, units=units, adapter=adapter)


def module_name(unit: UnitSpec, tensor: TensorSpec) -> str:
    """Path of the module that holds a tensor, for the unit's first name."""
    return f"{unit.names[0]}.{tensor.name}".strip(".").rpartition(".")[0]


def in_out(tensor: TensorSpec) -> tuple[int, int]:
    """Input and output features of a linear layer's weight."""
    first, second = tensor.shape
    return (first, second) if tensor.owner == "Conv1D" else (second, first)


def is_linear(tensor: TensorSpec) -> bool:
    """Whether the tensor is the weight of a linear layer, so that an adapter can stand beside it."""
    return len(tensor.shape) == 2 and tensor.name.endswith("weight") and tensor.owner in LINEAR_OWNERS


def _matches(model: ModelSpec, adapter: AdapterSpec) -> Iterator[str]:
    for unit, tensor in model.tensors():
        name = module_name(unit, tensor)
        if not is_linear(tensor):
            continue
        if adapter.target_modules == ALL_LINEAR:
            if unit.kind != "head" and not _is_tied_head(model, name):
                yield name
        elif any(_ends_with(name, target) for target in adapter.target_modules):
            yield name


def _saved(model: ModelSpec, adapter: AdapterSpec) -> Iterator[str]:
    for unit, tensor in model.tensors():
        name = module_name(unit, tensor)
        if any(_ends_with(name, saved) or f".{saved}." in f".{name}." for saved in adapter.modules_to_save):
            yield name


def _ends_with(name: str, suffix: str) -> bool:
    return name == suffix or name.endswith(f".{suffix}")


def _is_tied_head(model: ModelSpec, name: str) -> bool:
    return any(name == second.rpartition(".")[0] for _, second in model.tied)


def _adapted(unit: UnitSpec, adapter: AdapterSpec, targets: set[str], kept: set[str]) -> Iterator[TensorSpec]:
    for tensor in unit.tensors:
        name = module_name(unit, tensor)
        yield dataclasses.replace(tensor, trainable=False)
        if name in kept:  # peft trains a copy and keeps the original
            yield dataclasses.replace(tensor, name=f"{tensor.name}.modules_to_save", trainable=True)
        elif name in targets and is_linear(tensor):
            yield from _adapter_tensors(tensor, adapter)
        elif adapter.target_modules == ALL_LINEAR and _is_mixture_part(unit, tensor):
            yield from _mixture_tensors(tensor, adapter)


def _adapter_tensors(tensor: TensorSpec, adapter: AdapterSpec) -> Iterator[TensorSpec]:
    num_in, num_out = in_out(tensor)
    module = tensor.name.rpartition(".")[0]
    shapes = {"lora_A.weight": (adapter.r, num_in), "lora_B.weight": (num_out, adapter.r)}
    if adapter.method == "dora":
        shapes["lora_magnitude_vector.weight"] = (num_out,)  # type: ignore[assignment]
    for name, shape in shapes.items():
        full = f"{module}.{name}".lstrip(".")
        yield TensorSpec(name=full, shape=shape, dtype="float32", adapter=True, owner="Linear")


def _is_mixture_part(unit: UnitSpec, tensor: TensorSpec) -> bool:
    """A router, or experts stacked in one tensor, which peft adapts under "all-linear" as well."""
    stacked = [other for other in unit.tensors if len(other.shape) == 3 and ".experts." in other.name]
    return bool(stacked) and (tensor in stacked or tensor.name.endswith(".gate.weight"))


def _mixture_tensors(tensor: TensorSpec, adapter: AdapterSpec) -> Iterator[TensorSpec]:
    """Rank r per expert, and twice that where gate and up stand in one tensor (experts, out, in)."""
    if len(tensor.shape) == 2:
        yield from _adapter_tensors(tensor, adapter)
        return
    experts, num_out, num_in = tensor.shape
    rank = adapter.r * experts * (2 if tensor.name.endswith("gate_up_proj") else 1)
    for name, shape in (("lora_A.weight", (rank, num_in)), ("lora_B.weight", (num_out, rank))):
        yield TensorSpec(name=f"{tensor.name}.{name}", shape=shape, dtype="float32", adapter=True, owner="Linear")


def _nothing_matched(model: ModelSpec, field: str, given: object) -> str:
    names = sorted(
        {module_name(unit, tensor).rpartition(".")[2] for unit, tensor in model.tensors() if is_linear(tensor)}
    )
    return f"{field}={given!r} matches no module of {model.name}. Linear modules to choose from: {', '.join(names)}."
