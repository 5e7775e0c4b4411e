"""What other tools' estimators say of the same jobs, by calling the tools.

``accelerate estimate-memory`` looks a model up on the hub; here its own functions are given the model instead.
DeepSpeed's estimators are called where the library is installed; where it is not, the formulas that it documents
are applied (docs: Memory Requirements, ZeRO-2 and ZeRO-3 without offload), and the result says so.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PeerEstimate:
    """Bytes per device that other tools give for a job."""

    accelerate_bytes: int
    """``accelerate estimate-memory``: its column for training with Adam in the job's type."""
    zero2_bytes: int
    zero3_bytes: int
    deepspeed: str
    """The version called, or ``published formula``."""


def peer_estimate(folder: Path, dtype: str, num_devices: int) -> PeerEstimate:
    """The three figures for a model's folder. None of the tools takes batch, length, adapters or recomputation."""
    zero2, zero3, source = _deepspeed(*_counts(folder), num_devices)
    return PeerEstimate(
        accelerate_bytes=_accelerate(folder, dtype), zero2_bytes=zero2, zero3_bytes=zero3, deepspeed=source
    )


def _accelerate(folder: Path, dtype: str) -> int:
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights():
        model = AutoModel.from_config(config)
    size_bytes, _ = calculate_maximum_sizes(model.float())
    return max(estimate_training_usage(size_bytes, dtype).values())


def _counts(folder: Path) -> tuple[int, int]:
    """All parameters, and those of the module with the most of its own, as DeepSpeed's own helper counts them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model.tie_weights()
    return sum(p.numel() for p in model.parameters()), max(_own(model))


def _own(model: Any) -> Iterator[int]:
    for module in model.modules():
        yield sum(p.numel() for p in module.parameters(recurse=False))


def _deepspeed(params: int, largest: int, num_devices: int) -> tuple[int, int, str]:
    try:
        from deepspeed import __version__
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as zero3
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as zero2
    except ImportError:
        return (*published_formula(params, largest, num_devices), "published formula")
    without = {"num_gpus_per_node": num_devices, "num_nodes": 1, "cpu_offload": False}
    _, two = zero2(params, **without)
    _, three, _ = zero3(params, largest, **without, cpu_offload_params=False)
    return two, three, f"deepspeed {__version__}"


def published_formula(params: int, largest: int, num_devices: int) -> tuple[int, int]:
    """ZeRO-2: 2 bytes of weights whole and 18 of states shared; ZeRO-3: 18 shared and the largest layer in FP32."""
    shared = int(18 * params / num_devices)
    return 2 * params + shared, 4 * largest + shared
