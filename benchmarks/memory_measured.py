"""Peaks of steps that really run here: live tensors on CPU ranks, the allocator's own figures on a GPU."""

import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.launch import launch
from benchmarks.options import Options, Row
from benchmarks.report import table
from lightning_shard import AdapterSpec, Cluster, ModelSpec, Plan, TrainSpec
from lightning_shard.planner import estimate

GB, MB = 1e9, 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One configuration to measure."""

    size: str
    train: TrainSpec
    plan: Plan

    @property
    def case(self) -> str:
        train, plan = self.train, self.plan
        layout = {"ddp": f"ddp-{plan.dp_replicate}", "fsdp2": f"fsdp2-{plan.dp_shard}"}[plan.strategy]
        parts = [
            "measured",
            self.size,
            "full" if train.adapter is None else f"lora-r{train.adapter.r}",
            layout if plan.world_size > 1 else "one",
            f"resident-{plan.resident_blocks}" if plan.resident_blocks else "",
            "recompute" if plan.activation_checkpoint == "full" else "",
            train.precision,
            f"{train.micro_batch_size}x{train.seq_len}",
        ]
        return " ".join(filter(None, parts))


def cpu_jobs(size: str) -> list[Job]:
    """Two gloo ranks: every kind of plan, in full and with adapters."""
    plans = (
        Plan(dp_replicate=2),
        Plan(dp_shard=2),
        Plan(dp_shard=2, resident_blocks=1, adapters="replicated"),
        Plan(dp_shard=2, activation_checkpoint="full"),
    )
    trains = (TrainSpec(seq_len=48, micro_batch_size=2), TrainSpec(seq_len=48, micro_batch_size=2, adapter=_lora(4)))
    trains = (*trains, dataclasses.replace(trains[0], precision="bf16-mixed"))
    return [
        Job(size=size, train=dataclasses.replace(train, optimizer_implementation="loop"), plan=plan)
        for train in trains
        for plan in plans
        if not (plan.resident_blocks and train.adapter is None)
    ]


def cuda_jobs() -> list[Job]:
    """One GPU: shapes of 1, 3 and 8 billion parameters, in full where they fit and with adapters."""

    def job(size: str, rows: int, tokens: int, **fields: Any) -> Job:
        recompute = fields.pop("recompute", False)
        train = TrainSpec(micro_batch_size=rows, seq_len=tokens, gradients_cleared="before_backward", **fields)
        return Job(size=size, train=train, plan=Plan(activation_checkpoint="full" if recompute else "none"))

    return [
        job("1b", 1, 2048), job("1b", 4, 2048), job("1b", 4, 2048, recompute=True), job("1b", 2, 4096),
        job("1b", 4, 2048, precision="bf16-mixed"), job("1b", 4, 2048, optimizer_implementation="fused"),
        job("1b", 2, 2048, precision="32-true"), job("3b", 2, 2048, recompute=True), job("3b", 2, 4096),
        job("1b", 4, 2048, adapter=_lora(16)), job("3b", 2, 4096, adapter=_lora(16)),
        job("8b", 1, 2048, adapter=_lora(16)), job("8b", 2, 4096, adapter=_lora(16)),
        job("8b", 4, 4096, adapter=_lora(16), recompute=True),
    ]  # fmt: skip


def _lora(r: int) -> AdapterSpec:
    return AdapterSpec(r=r)


def run(options: Options) -> Iterator[list[Row]]:
    """Measure every job beside what the plan and the simulation say of it."""
    jobs = cuda_jobs() if options.device == "cuda" else cpu_jobs("tiny" if options.smallest else "mini")
    if options.smallest:
        jobs = jobs[:1]
    for job in jobs:
        if not options.wants(job.case):
            continue
        row = _measure(job, options)
        measured, predicted = row["allocated_bytes"] / MB, row["predicted_allocated"] / MB
        print(f"{row['case']:<60} measured {measured:9.3f} MB, plan {predicted:9.3f}", flush=True)
        yield [row]


def _measure(job: Job, options: Options) -> Row:
    with tempfile.TemporaryDirectory() as name:
        _save_config(job, Path(name))
        body = real_peak if options.device == "cpu" else gpu_peak
        measured = launch(job.plan.world_size, body, job, device=options.device)[0]
        simulated = launch(1, simulated_peak, job, name)[0]
        spec = ModelSpec.from_pretrained(name)
    cluster = Cluster.detect(devices=job.plan.world_size)
    predicted = estimate(spec, job.train, job.plan, cluster)
    return {
        "case": job.case,
        "kind": "measured",
        **measured,
        "predicted_allocated": predicted.allocated_bytes,
        "predicted_reserved": predicted.reserved_bytes,
        "predicted_step_s": predicted.step_s,
        **simulated,
    }


def _save_config(job: Job, folder: Path) -> None:
    from benchmarks.work import llama_config

    llama_config(job.size, job.train.seq_len).save_pretrained(folder)


def simulated_peak(job: Job, folder: str) -> dict[str, int]:
    """The same step without memory, in a process of its own."""
    from lightning_shard.simulate import simulate

    simulation = simulate(folder, job.train, job.plan)
    return {"simulated_allocated": simulation.allocated_bytes, "simulated_reserved": simulation.reserved_bytes}


def real_peak(job: Job) -> dict[str, int]:
    """Live tensor bytes at the peak of a real step on this rank, by a count of storages."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks.work import SEED, llama_config
    from lightning_shard.parallelize import parallelize
    from lightning_shard.simulate.build import add_adapter
    from lightning_shard.simulate.causal import CausalStep, token_batch
    from lightning_shard.simulate.cuda_like import allocate_as_cuda
    from lightning_shard.simulate.optimizers import make_optimizer
    from lightning_shard.simulate.run import count_step
    from lightning_shard.simulate.tracker import Tracker

    torch.manual_seed(SEED)
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM(llama_config(job.size, job.train.seq_len))
    root = CausalStep(model if job.train.adapter is None else add_adapter(model, job.train.adapter))
    mesh = None
    if job.plan.strategy == "fsdp2":
        mesh = init_device_mesh("cpu", (job.plan.dp_shard,), mesh_dim_names=("dp_shard",))
    layout = parallelize(root, job.plan, precision=job.train.precision_row, device=torch.device("cpu"), mesh=mesh)
    tracker = Tracker()
    with allocate_as_cuda():
        count_step(
            layout,
            tracker,
            batch=lambda: token_batch(job.train),
            optimizers=lambda laid_out: [make_optimizer(laid_out.parameters(), job.train)],
            accumulate=1,
            zero_grad=job.train.gradients_cleared,
            fake=False,
        )
    return {"allocated_bytes": max(moment.allocated_bytes for moment in tracker.peaks.values())}


def gpu_peak(job: Job) -> dict[str, Any]:
    """Peaks of a Trainer's steps on this GPU, after the first step has made the optimizer's state."""
    import statistics

    import torch

    from benchmarks.gpu import fit_on_gpu

    steps = fit_on_gpu(job.size, job.train, job.plan, steps=6)
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "device_bytes": total - free,
        "step_s": statistics.median(steps[2:]),
    }


def tables(rows: list[Row]) -> list[str]:
    parts = []
    for device, unit, name in (("cpu", MB, "MB"), ("cuda", GB, "GB")):
        some = [row for row in rows if row["device"] == device]
        if some:
            what = "live tensors of real steps on two gloo ranks" if device == "cpu" else some[0]["hardware"]["gpu"]
            parts += [f"Measured here, {what}, {name} at the peak:", _table(some, unit)]
    return parts


def _table(rows: list[Row], unit: float) -> str:
    reserved = any("reserved_bytes" in row for row in rows)
    names = ["allocated", *(["reserved"] if reserved else [])]
    columns = ["job"]
    for name in names:
        columns += [f"{name}: measured", "plan", "error", "simulated", "error"]
    body = []
    for row in rows:
        cells = [row["case"].removeprefix("measured ")]
        for name in names:
            measured = row[f"{name}_bytes"]
            cells.append(f"{measured / unit:.2f}")
            for method in ("predicted", "simulated"):
                value = row[f"{method}_{name}"]
                cells += [f"{value / unit:.2f}", f"{value / measured - 1:+.1%}"]
        body.append(cells)
    return table(columns, body)
