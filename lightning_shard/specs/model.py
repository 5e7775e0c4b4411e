"""What a model is made of, without the model: shapes, dtypes, what trains, and the facts activations need."""

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_shard.specs.adapter import AdapterSpec
from lightning_shard.specs.architecture import Architecture
from lightning_shard.specs.precision import Precision, dtype_bytes

UnitKind = Literal["block", "embedding", "head", "root"]
FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One parameter: its name inside its unit, shape, storage type and whether it trains."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    trainable: bool = True
    adapter: bool = False
    """Added by an adapter."""
    owner: str = ""
    """Class of the module that holds it: ``Linear``, ``Embedding``, ``Conv1D`` (GPT-2's (in, out) layout) ..."""

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    def shard_numel(self, num_shards: int) -> int:
        """Elements that the fullest rank holds when dim 0 is cut into ``num_shards`` chunks of ceil(d0/n) rows."""
        if not self.shape:
            return 1
        return math.ceil(self.shape[0] / num_shards) * math.prod(self.shape[1:])

    @property
    def element_bytes(self) -> int:
        """Bytes of one stored element."""
        return dtype_bytes(self.dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitSpec:
    """A wrap group: what is gathered and freed together. Equal neighbours are one unit with several names."""

    kind: UnitKind
    names: tuple[str, ...]
    """Module paths, one per repetition, in order."""
    tensors: tuple[TensorSpec, ...]
    module_class: str = ""

    @property
    def count(self) -> int:
        """Repetitions."""
        return len(self.names)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Everything the planner needs to know about a model, as plain facts."""

    name: str
    family: str = "unknown"
    """transformers' ``model_type``, or ``unknown``."""
    units: tuple[UnitSpec, ...] = ()
    """Blocks in order, then embedding, head and what is left (root)."""
    buffers_bytes: int = 0
    tied: tuple[tuple[str, str], ...] = ()
    """Names of tensors that are one and the same, each pair counted once."""
    architecture: Architecture | None = None
    """Facts for activations; None means they are estimated coarsely from the shapes."""
    adapter: AdapterSpec | None = None
    """The adapter whose tensors are among the units; None where there is none."""
    tp_plan: tuple[tuple[str, str], ...] = ()
    """How the model itself would split its blocks' layers: (layer within a block, transformers' style)."""
    warnings: tuple[str, ...] = ()

    def tensors(self) -> Iterator[tuple[UnitSpec, TensorSpec]]:
        """Every tensor with its unit; a unit of several names comes once."""
        for unit in self.units:
            for tensor in unit.tensors:
                yield unit, tensor

    @property
    def blocks(self) -> tuple[UnitSpec, ...]:
        """The units that are blocks."""
        return tuple(unit for unit in self.units if unit.kind == "block")

    @property
    def num_blocks(self) -> int:
        """Blocks, repetitions counted."""
        return sum(unit.count for unit in self.blocks)

    @property
    def num_parameters(self) -> int:
        """Parameters, tied ones counted once."""
        return sum(unit.count * tensor.numel for unit, tensor in self.tensors())

    @property
    def num_trainable(self) -> int:
        """Parameters that train."""
        return sum(unit.count * tensor.numel for unit, tensor in self.tensors() if tensor.trainable)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters as stored."""
        return sum(unit.count * tensor.numel * tensor.element_bytes for unit, tensor in self.tensors())

    def with_adapter(self, adapter: AdapterSpec) -> "ModelSpec":
        """The same model with an adapter's tensors added and everything else frozen.

        Raises:
            ValueError: when a target matches no module; the names to choose from are listed.
        """
        from lightning_shard.specs.inject import inject

        return inject(self, adapter)

    def with_dtypes(self, precision: Precision) -> "ModelSpec":
        """The same model stored as a precision asks: what trains in its master dtype, the rest in its frozen dtype.
        Integers and values of one byte (quantised weights) stay as they are.
        """

        def stored(tensor: TensorSpec) -> TensorSpec:
            if "int" in tensor.dtype or dtype_bytes(tensor.dtype) < 2:
                return tensor
            dtype = precision.master_dtype if tensor.trainable else precision.frozen_dtype or tensor.dtype
            return tensor if dtype == tensor.dtype else dataclasses.replace(tensor, dtype=dtype)

        return self._map_tensors(stored)

    def with_storage(self, dtype: str) -> "ModelSpec":
        """The same model loaded in one dtype."""
        dtype_bytes(dtype)
        return self._map_tensors(lambda tensor: dataclasses.replace(tensor, dtype=dtype))

    def _map_tensors(self, change: Any) -> "ModelSpec":
        units = tuple(
            dataclasses.replace(unit, tensors=tuple(change(tensor) for tensor in unit.tensors)) for unit in self.units
        )
        return dataclasses.replace(self, units=units)

    @classmethod
    def from_module(cls, module: Any, *, name: str | None = None) -> "ModelSpec":
        """Read a live or meta module; only iterates over it.

        Raises:
            ValueError: when the module has no parameters.
        """
        from lightning_shard.specs.from_module import read_module

        return read_module(module, name=name)

    @classmethod
    def from_pretrained(cls, model: str | Path) -> "ModelSpec":
        """Read a folder with a ``config.json``, a saved spec or a hub id; no weights are loaded.

        Raises:
            ValueError: when there is no such model or its config is not complete.
        """
        from lightning_shard.specs.from_pretrained import read_pretrained

        return read_pretrained(model)

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain JSON values."""
        values = dataclasses.asdict(self)
        return {"format": FORMAT, **values}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelSpec":
        """The spec that :meth:`to_dict` wrote.

        Raises:
            ValueError: when the values are not a spec, or of a newer format.
        """
        from lightning_shard.specs.model_json import spec_from_dict

        return spec_from_dict(values)

    def save(self, path: str | Path) -> None:
        """Write the spec as JSON."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "ModelSpec":
        """The spec that :meth:`save` wrote.

        Raises:
            ValueError: when the file is missing or is not a spec.
        """
        from lightning_shard.specs.model_json import load_spec

        return load_spec(Path(path))
