"""Reading a saved ModelSpec."""

import json
from pathlib import Path
from typing import Any, get_args

from lightning_shard.specs.adapter import AdapterSpec
from lightning_shard.specs.architecture import Architecture
from lightning_shard.specs.model import FORMAT, ModelSpec, TensorSpec, UnitKind, UnitSpec
from lightning_shard.specs.precision import dtype_bytes
from lightning_shard.specs.sizes import require_choice, require_count


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
    except (KeyError, TypeError, AttributeError) as error:
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
            "tied": tuple(_pair(row) for row in values.get("tied", ())),
            "buffers_bytes": _count("buffers_bytes", values.get("buffers_bytes", 0), 0),
            "architecture": None if facts is None else _architecture(facts),
            "adapter": None if adapter is None else AdapterSpec.from_dict(adapter),
            "tp_plan": tuple(_pair(row) for row in values.get("tp_plan", ())),
            "warnings": tuple(values.get("warnings", ())),
        }
    )


def _pair(row: Any) -> tuple[str, str]:
    if not isinstance(row, (list, tuple)) or len(row) != 2:
        raise TypeError(f"{row!r} is no pair of names")
    return str(row[0]), str(row[1])


def _count(name: str, value: Any, minimum: int) -> int:
    require_count(f"The model spec's {name}", value, minimum=minimum)
    return int(value)


def _architecture(facts: dict[str, Any]) -> Architecture:
    architecture = Architecture(**facts)
    for name in ("hidden", "num_layers", "heads", "kv_heads", "head_dim", "ffn"):
        _count(name, getattr(architecture, name), 1)
    for name in ("vocab", "experts", "experts_per_token", "expert_ffn", "shared_expert_ffn", "decoder_layers"):
        _count(name, getattr(architecture, name), 0)
    return architecture


def _unit(values: dict[str, Any]) -> UnitSpec:
    tensors = tuple(TensorSpec(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in values["tensors"])
    unit = UnitSpec(**{**values, "names": tuple(values["names"]), "tensors": tensors})
    require_choice("The model spec's kind of a unit", unit.kind, get_args(UnitKind))
    if not unit.names:
        raise ValueError("The model spec has a unit without a name. Make it again with `lightning-shard spec`.")
    for tensor in unit.tensors:
        if any(size < 0 for size in tensor.shape):
            raise ValueError(f"The model spec gives {tensor.name} the shape {tensor.shape}: sizes cannot be negative.")
        dtype_bytes(tensor.dtype)  # raises on an unknown one
    return unit
