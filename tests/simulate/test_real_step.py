"""Live tensor bytes of real steps on two ranks, counted by the same tracker, against the simulated ones."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.checkered import checkered
from helpers.llama import make_llama
from torch.distributed.device_mesh import init_device_mesh

from lightning_shard.parallelize import parallelize
from lightning_shard.plans import Plan
from lightning_shard.simulate import simulate
from lightning_shard.simulate.causal import CausalStep, token_batch
from lightning_shard.simulate.collectives import summarise
from lightning_shard.simulate.cuda_like import allocate_as_cuda
from lightning_shard.simulate.optimizers import make_optimizer
from lightning_shard.simulate.patches import patched
from lightning_shard.simulate.run import count_step
from lightning_shard.simulate.source import add_adapter
from lightning_shard.simulate.tracker import SETUP, Tracker
from lightning_shard.specs import AdapterSpec, TrainSpec
from lightning_shard.testing import run_ranks

PLANS = {
    "ddp": Plan(dp_replicate=2),
    "fsdp2": Plan(dp_shard=2),
    "half-resident": Plan(dp_shard=2, resident_blocks=2),
    "fsdp2-kept": Plan(dp_shard=2, reshard_after_forward=False),
    "recompute": Plan(dp_shard=2, activation_checkpoint="full"),
    "ddp-recompute": Plan(dp_replicate=2, activation_checkpoint="full"),
}


@contextmanager
def settled_waits() -> Iterator[None]:
    """Give gloo's threads time to let go of a finished collective's buffers.

    A thread holds them until a little after it told that it is done. On a busy machine that added one gathered block's
    bytes to a moment in one step of ten.
    """
    wait = dist.Work.wait

    def patiently(work: dist.Work, *args: Any) -> Any:
        result = wait(work, *args)
        time.sleep(0.005)
        return result

    with patched(dist.Work, "wait", patiently):
        yield


def real_steps(plan: Plan, train: TrainSpec) -> dict[str, Any]:
    """The least of five steps at each moment: a late thread only ever adds bytes."""
    steps = [real_step(plan, train) for _ in range(5)]
    assert all(step["collectives"] == steps[0]["collectives"] for step in steps)
    return {
        "moments": {
            name: min((step["peaks"][name] for step in steps), key=lambda peak: peak.allocated_bytes)
            for name in steps[0]["peaks"]
        },
        "collectives": steps[0]["collectives"],
    }


def real_step(plan: Plan, train: TrainSpec) -> dict[str, Any]:
    """What one rank of a real step counts."""
    model = make_llama(hidden_size=64, intermediate_size=160, vocab_size=256)
    root = CausalStep(model if train.adapter is None else add_adapter(model, train.adapter))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)) if plan.strategy == "fsdp2" else None
    tracker = Tracker()
    with allocate_as_cuda(), settled_waits():
        layout = parallelize(root, plan, precision=train.precision_row, device=torch.device("cpu"), mesh=mesh)
        count_step(
            layout,
            tracker,
            batch=lambda: token_batch(train),
            optimizers=lambda laid_out: [make_optimizer(laid_out.parameters(), train)],
            accumulate=train.accumulate,
            zero_grad=train.gradients_cleared,
            fake=False,
        )
    return {"peaks": tracker.peaks, "collectives": summarise(tracker.collectives)}


@pytest.mark.parametrize("precision", ["bf16-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)])
@pytest.mark.parametrize(*checkered(name=PLANS, training=["full", "lora"]))
def test_simulated_bytes_are_those_of_a_real_step(name: str, training: str, precision: str) -> None:
    adapter = AdapterSpec(r=4, dropout=0.1) if training == "lora" else None
    train = TrainSpec(
        micro_batch_size=2,
        seq_len=48,
        adapter=adapter,
        precision=precision,
        accumulate=2,
        gradients_cleared="before_backward",
    )
    real = run_ranks(2, real_steps, PLANS[name], train)[0]
    simulated = simulate(lambda: make_llama(hidden_size=64, intermediate_size=160, vocab_size=256), train, PLANS[name])
    moments = {moment.name: moment.allocated_bytes for moment in simulated.moments}
    measured = {name: peak.allocated_bytes for name, peak in real["moments"].items() if name != SETUP}
    assert moments == pytest.approx(measured, rel=0.03)
    peak = max(simulated.moments, key=lambda moment: moment.allocated_bytes)
    assert simulated.allocated_bytes == peak.allocated_bytes
    assert peak.kinds == simulated.kinds == pytest.approx(real["moments"][peak.name].kinds, rel=0.03)
    assert simulated.collectives == real["collectives"]
