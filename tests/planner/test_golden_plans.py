"""Golden plans: what is chosen and what it needs, so that a change of the planner shows in review.

``python tests/planner/test_golden_plans.py`` writes the file anew.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hand_specs import GIB, LLAMA_1B, LLAMA_2_7B, LLAMA_8B, LLAMA_70B, cluster

from lightning_shard.planner import choose
from lightning_shard.plans import Plan
from lightning_shard.specs import AdapterSpec, ModelSpec, TrainSpec

GOLDEN = Path(__file__).parent / "golden_plans.json"
LORA = AdapterSpec(r=16)
CASES: dict[str, tuple[ModelSpec, TrainSpec, tuple[str, int, int]]] = {
    "1b-full-1xh100": (LLAMA_1B, TrainSpec(seq_len=4096), ("h100-sxm", 1, 1)),
    "1b-full-8xl40s": (LLAMA_1B, TrainSpec(seq_len=4096), ("l40s", 8, 1)),
    "7b-lora-1xrtx-4090": (LLAMA_2_7B, TrainSpec(seq_len=1024, adapter=LORA), ("rtx-4090", 1, 1)),
    "7b-full-8xa100": (LLAMA_2_7B, TrainSpec(seq_len=2048), ("a100-80", 8, 1)),
    "8b-lora-8xh100": (LLAMA_8B, TrainSpec(seq_len=4096, adapter=LORA), ("h100-sxm", 8, 1)),
    "8b-lora-2x8-l40s": (LLAMA_8B, TrainSpec(seq_len=2048, adapter=LORA), ("l40s", 8, 2)),
    "8b-full-8xh200": (LLAMA_8B, TrainSpec(seq_len=8192), ("h200", 8, 1)),
    "70b-lora-8xh100": (LLAMA_70B, TrainSpec(seq_len=2048, adapter=LORA), ("h100-sxm", 8, 1)),
    "70b-full-8xh100": (LLAMA_70B, TrainSpec(seq_len=2048), ("h100-sxm", 8, 1)),
    "70b-full-128x8-h100": (LLAMA_70B, TrainSpec(seq_len=8192), ("h100-sxm", 8, 128)),
}


def decide(name: str) -> dict[str, Any]:
    """The choice and its figures, rounded to what a reader compares."""
    model, train, (device, devices, nodes) = CASES[name]
    decision = choose(model, train, cluster(device, devices, nodes))
    default = Plan().to_dict()
    return {
        "fits": decision.fits,
        "plan": {key: value for key, value in decision.plan.to_dict().items() if value != default[key]},
        "peak_at": decision.estimate.peak_at,
        "allocated_gib": round(decision.estimate.allocated_bytes / GIB, 2),
        "device_gib": round(decision.estimate.device_bytes / GIB, 2),
        "step_s": float(f"{decision.estimate.step_s:.3g}"),
    }


@pytest.mark.parametrize("name", CASES)
def test_golden(name: str) -> None:
    assert decide(name) == json.loads(GOLDEN.read_text())[name]


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: decide(name) for name in CASES}, indent=1) + "\n")
