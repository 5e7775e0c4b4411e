"""Reading a saved ModelSpec."""

import json
from pathlib import Path
from typing import Any

from lightning_shard.specs.adapter import AdapterSpec
from lightning_shard.specs.architecture import Architecture
from lightning_shard.specs.model import FORMAT, ModelSpec, TensorSpec, UnitSpec
from lightning_shard.specs.precision import dtype_bytes


def spec_from_dict(values: dict[str, Any]) -> ModelSpec:
    """A ModelSpec from plain JSON values."""
    found = values.get("format") if isinstance(values, dict) else None
    if found is None:
        raise ValueError(
            "This is not a saved model spec: it has no 'format'. Make one with `lightning-shard spec MODEL`."
        )
    if found != FORMAT:
        raise ValueError(
            f"The model spec has format {found}, this version reads {FORMAT}. Make it again from the model."
        )
    try:
        return _build({key: value for key, value in values.items() if key != "format"})
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"The model spec is not complete: {error}. Make it again with `lightning-shard spec`."
        ) from error


def load_spec(path: Path) -> ModelSpec:
    """The spec in a file."""
    if not path.is_file():
        raise ValueError(f"There is no model spec at {path}. Make one with `lightning-shard spec MODEL > {path.name}`.")
    try:
        values = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not readable as JSON: {error}.") from error
    return spec_from_dict(values)


def _build(values: dict[str, Any]) -> ModelSpec:
    facts, adapter = values.get("architecture"), values.get("adapter")
    return ModelSpec(
        **{
            **values,
            "units": tuple(_unit(unit) for unit in values["units"]),
            "tied": tuple((str(first), str(second)) for first, second in values.get("tied", ())),
            "architecture": None if facts is None else Architecture(**facts),
            "adapter": None if adapter is None else AdapterSpec.from_dict(adapter),
            "tp_plan": tuple((str(layer), str(style)) for layer, style in values.get("tp_plan", ())),
            "warnings": tuple(values.get("warnings", ())),
        }
    )


def _unit(values: dict[str, Any]) -> UnitSpec:
    tensors = tuple(TensorSpec(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in values["tensors"])
    unit = UnitSpec(**{**values, "names": tuple(values["names"]), "tensors": tensors})
    for tensor in unit.tensors:
        if any(size < 0 for size in tensor.shape):
            raise ValueError(f"The model spec gives {tensor.name} the shape {tensor.shape}: sizes cannot be negative.")
        dtype_bytes(tensor.dtype)  # raises on an unknown one
    return unit
