"""The tables of docs/many-nodes.md. Needs no GPU and no weights.

python tests/nodes/scale_table.py               what is planned: seconds
python tests/nodes/scale_table.py --simulate    some of the same plans' steps, run without memory: minutes
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from lightning_shard import AdapterSpec, Cluster, Decision, ModelSpec, TrainSpec, plan
from lightning_shard.hardware import find_device, find_link
from lightning_shard.memory.situation import make_situation
from lightning_shard.planner.considered import inject
from lightning_shard.traffic import link_bytes

CONFIGS = Path(__file__).parents[1] / "planner/configs"
MODELS = {"Llama 8B": "llama-3.1-8b", "Llama 70B": "llama-3-70b", "Llama 405B": "llama-3.1-405b"}
LENGTH = {"Llama 405B": 4096}
"""Tokens per sequence where 8,192 do not fit at any size."""
DEVICES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
PER_NODE = 8
FULL = TrainSpec(micro_batch_size=1, seq_len=8192, precision="bf16-true")
LORA = replace(FULL, adapter=AdapterSpec(r=16, alpha=32.0))

SIMULATED = (
    ("Llama 8B", FULL, (8, 64, 512)),
    ("Llama 8B", LORA, (8, 64)),
    ("Llama 70B", FULL, (64,)),
    ("Llama 70B", LORA, (8, 64)),
)
"""What --simulate runs."""


def cluster(num_devices: int, device: str = "h100-sxm", between: str = "ib400") -> Cluster:
    """Nodes of eight devices."""
    row = find_device(device)
    assert row is not None
    return Cluster(
        num_nodes=num_devices // PER_NODE,
        devices_per_node=PER_NODE,
        device=row,
        intra_link=find_link(row.intra_link),
        inter_link=find_link(between),
    )


def layout(decision: Decision) -> str:
    """A plan in a few words."""
    chosen = decision.plan
    if chosen.strategy == "ddp":
        words = [f"DDP x {chosen.dp_replicate}"]
    else:
        words = [f"shard {chosen.dp_shard}"]
        words += [f"x {chosen.dp_replicate} replicas"] if chosen.dp_replicate > 1 else []
        words += [f"x TP {chosen.tp}"] if chosen.tp > 1 else []
        words += [f", {chosen.resident_blocks} resident"] if chosen.resident_blocks else []
        words += [", kept for backward"] if chosen.reshard_after_forward is False else []
    count = chosen.activation_checkpoint_blocks
    if chosen.activation_checkpoint != "none":
        words += [f", {'all' if count is None else count} blocks recompute"]
    return " ".join(words).replace(" ,", ",")


def size(num_bytes: float) -> str:
    """GB, as datasheets count."""
    return "0" if not num_bytes else f"{num_bytes / 1e9:.3g}"


def row(model: ModelSpec, train: TrainSpec, where: Cluster) -> str:
    """One size of one model."""
    decision = plan(model, train, where)
    if not decision.fits:
        lacks = decision.shortfall_bytes / 2**30
        return f"| {where.world_size:,} | does not fit: lacks {lacks:.1f} GiB a device | | | | | |"
    estimate = decision.estimate
    sent = link_bytes(make_situation(inject(model, train), train, decision.plan, where))
    return (
        f"| {where.world_size:,} | {layout(decision)} | {estimate.device_bytes / 2**30:.0f} | {size(sent.intra_bytes)} | "
        f"{size(sent.inter_bytes)} | {estimate.tokens_per_s / where.world_size:,.0f} | {estimate.mfu:.0%} / "
        f"{1 - estimate.comm_share:.0%} |"
    )


def tables() -> Iterator[str]:
    """Every model, in full and with LoRA."""
    for name, folder in MODELS.items():
        model = ModelSpec.from_pretrained(CONFIGS / folder)
        length = LENGTH.get(name, FULL.seq_len)
        for what, train in (("full", FULL), ("LoRA r 16 on all linear layers", LORA)):
            yield f"#### {name}, {what}, sequences of {length:,}\n"
            yield "| devices | plan | GiB a device | GB inside the node, per device | GB out of a node | tokens/s a device | MFU / not waiting |"
            yield "|--:|--|--:|--:|--:|--:|--:|"
            for count in DEVICES:
                yield row(model, replace(train, seq_len=length), cluster(count))
            yield ""


def simulated() -> Iterator[str]:
    """Plans of the tables against their own step, run on tensors without memory."""
    from lightning_shard.simulate import simulate

    yield "| model | devices | GiB a device, planned | simulated | GB over the wire a device, planned | simulated | collectives |"
    yield "|--|--:|--:|--:|--:|--:|--:|"
    for name, train, sizes in SIMULATED:
        model = ModelSpec.from_pretrained(CONFIGS / MODELS[name])
        for count in sizes:
            decision = plan(model, train, cluster(count))
            found = simulate(CONFIGS / MODELS[name], train, decision.plan, depth="extrapolated")
            ranks = {"all_gather": decision.plan.dp_shard, "reduce_scatter": decision.plan.dp_shard}
            sent, calls = 0.0, []
            for one in found.collectives:
                n = ranks.get(one.kind, decision.plan.dp_replicate if decision.plan.dp_replicate > 1 else count)
                sent += one.num_bytes * (n - 1) / n * (2 if one.kind == "all_reduce" else 1)
                calls.append(f"{one.count} {one.kind.replace('_', '-')}")
            yield (
                f"| {name} {'LoRA' if train.adapter else 'full'} | {count:,} | {decision.estimate.device_bytes / 2**30:.1f} | "
                f"{found.device_bytes / 2**30:.1f} | {size(decision.estimate.comm_bytes)} | {size(sent)} | {', '.join(calls)} |"
            )
            sys.stderr.write(f"{name} {count}: {found.wall_s:.0f} s\n")


if __name__ == "__main__":
    for line in simulated() if "--simulate" in sys.argv else tables():
        print(line, flush=True)
