"""Facts and wishes: what the model is, what the user wants, what there is to run on.

Neither torch nor Lightning is imported here; the doors (:meth:`ModelSpec.from_module`,
:meth:`ModelSpec.from_pretrained`) import what they need when they are called.
"""

from lightning_shard.specs.adapter import AdapterMethod, AdapterSpec
from lightning_shard.specs.architecture import Architecture
from lightning_shard.specs.model import ModelSpec, TensorSpec, UnitSpec
from lightning_shard.specs.optimizer import OPTIMIZERS, Optimizer, find_optimizer
from lightning_shard.specs.precision import DTYPE_BYTES, PRECISIONS, Precision, dtype_bytes, find_precision
from lightning_shard.specs.sizes import format_bytes, parse_bytes
from lightning_shard.specs.train import TrainSpec

__all__ = [
    "DTYPE_BYTES",
    "OPTIMIZERS",
    "PRECISIONS",
    "AdapterMethod",
    "AdapterSpec",
    "Architecture",
    "ModelSpec",
    "Optimizer",
    "Precision",
    "TensorSpec",
    "TrainSpec",
    "UnitSpec",
    "dtype_bytes",
    "find_optimizer",
    "find_precision",
    "format_bytes",
    "parse_bytes",
]
