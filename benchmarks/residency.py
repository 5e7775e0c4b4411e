"""The residency dial with adapters: bytes held, bytes sent and step time at 0 to 100 % of the blocks resident.

Cases are named LINK-RANKS, and LINK-RANKS-accumulate for four micro-batches a step. Over ``--link 1gbit`` and the
others the ranks are dealt to two network namespaces with a rate-limited link between them. Predictions come from the
links that the job's own group was measured at, and from the compute time of a rank that talks to no other.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from benchmarks.compare import compare
from benchmarks.launch import Node
from benchmarks.network import nodes_over
from benchmarks.options import Options, Row
from benchmarks.report import table
from benchmarks.step_time import show_ratio
from benchmarks.turns import sent_over
from benchmarks.work import Work
from lightning_shard import Cluster, ModelSpec, Plan, TrainSpec
from lightning_shard.hardware import LinkProfile
from lightning_shard.planner import estimate, simplicity
from lightning_shard.planner.calibration import Calibration

BASELINE = "lightning-mp"
DIAL = ("ours-r0", "ours-r2", "ours-r4", "ours-r6", "ours-r8")
LABELS = {name: f"{25 * i} % resident" for i, name in enumerate(DIAL)} | {
    "ours-r8+fused": "100 % resident, fused AdamW",
    "ours-ddp": "replicated",
    "ours-ddp+fused": "replicated, fused AdamW",
    "ours-hsdp": "sharded in pairs, replicated across",
    "ours-kept": "kept gathered until the last micro-batch",
}
STEPS = {"loopback": 12, "10gbit": 12, "1gbit": 10, "100mbit": 6}
PROBED_BYTES = {"100mbit": (2**16, 2**20, 4 * 2**20)}
"""Smaller messages over the slowest link, which would take minutes otherwise."""
TIE = 1.01
WITHIN = 1.05
"""The plan that is predicted best is right when no other measured plan is 5 % faster."""


def run(options: Options) -> Iterator[list[Row]]:
    """The dial on 2 and 4 ranks, and once with accumulation, over the link asked for."""
    if options.smallest:
        yield _case(
            "loopback-2", Work(size="tiny", training="lora", tokens=16, steps=5), 2, ("ours-r0", "ours-r2"), (Node(),)
        )
        return
    link = options.link
    with nodes_over(link) as nodes:
        for case in options.chosen([f"{link}-2", f"{link}-4", f"{link}-2-accumulate"]):
            work = Work(size="s", training="lora", steps=STEPS[link], device=options.device)
            ranks = int(case.split("-")[1])
            names: tuple[str, ...] = (*DIAL, "ours-r8+fused", "ours-ddp")
            if case.endswith("accumulate"):
                work = dataclasses.replace(work, accumulate=4, steps=7)
                names = ("ours-r0", "ours-kept", "ours-r8", "ours-ddp")
            elif ranks == 4:
                names = (*DIAL, "ours-ddp", "ours-hsdp")
            yield _case(case, work, ranks, names, nodes)


def _case(case: str, work: Work, ranks: int, names: tuple[str, ...], nodes: tuple[Node, ...]) -> list[Row]:
    peers = () if work.size == "tiny" else ("accelerate-fsdp2",) if work.accumulate == 1 else ()
    link = case.split("-")[0]
    profiles: list[LinkProfile] = []
    engines = ("local", BASELINE, *peers, *names)
    measured = compare(work, engines, ranks, nodes=nodes, links=profiles, probed_bytes=PROBED_BYTES.get(link))
    links = profiles[0]
    local_s = next(row["step_s"] for row in measured if row["engine"] == "local")
    cluster = calibrated(work, links, len(nodes), ranks // len(nodes), local_s)
    rows = []
    for row in measured:
        plan = Plan.from_dict(row["plan"]) if "plan" in row else None
        predicted = None if plan is None else estimate(spec_of(work), train_spec(work), plan, cluster)
        if plan is not None and plan.dp_replicate > 1 < plan.dp_shard:  # with adapters nothing but they is all-reduced
            row["sent_bytes"] = sent_over(row["collectives"], ranks, shards=plan.dp_shard)
        rows.append(
            {
                "case": case,
                "link": link,
                "ranks": ranks,
                "accumulate": work.accumulate,
                **row,
                "predicted_s": None if predicted is None else predicted.step_s,
                "predicted_bytes": None if predicted is None else predicted.comm_bytes,
                "link_bytes_per_s": (links.inter or links.intra).bytes_per_s if links.inter or links.intra else None,
                "link_latency_s": (links.inter or links.intra).latency_s if links.inter or links.intra else None,
            }
        )
        print(_line(rows[-1]), flush=True)
    print(_verdict(rows), flush=True)
    return rows


def spec_of(work: Work) -> ModelSpec:
    """The model's facts, adapters included."""
    import torch

    from benchmarks.work import build

    with torch.device("meta"):
        return ModelSpec.from_module(build(work), name=work.size)


def train_spec(work: Work) -> TrainSpec:
    return TrainSpec(
        micro_batch_size=work.rows,
        seq_len=work.tokens,
        accumulate=work.accumulate,
        precision=work.precision,
        optimizer_implementation="loop",
        gradients_cleared="before_backward",
    )


def calibrated(work: Work, links: LinkProfile, nodes: int, per_node: int, local_s: float) -> Cluster:
    """This job's cluster: measured links, and a speed that explains the step of a rank that talks to no other."""
    detected = Cluster.detect(devices=per_node, nodes=nodes)
    plain = dataclasses.replace(detected, num_nodes=1, devices_per_node=1)
    alone = estimate(spec_of(work), train_spec(work), Plan(), plain)
    return links.apply(Calibration(step_ratio=local_s / alone.step_s).apply(detected))


def verdict(rows: list[Row]) -> tuple[str, str, float]:
    """The plan predicted fastest (of those within 1 % the simplest), the one measured fastest, the ratio of their steps."""
    ours = [row for row in rows if row["predicted_s"] and not row["engine"].endswith("+fused")]
    least = min(row["predicted_s"] for row in ours)
    near = [row for row in ours if row["predicted_s"] <= TIE * least]
    chosen = min(near, key=lambda row: (simplicity(Plan.from_dict(row["plan"])), row["predicted_s"]))
    fastest = min(ours, key=lambda row: row["step_s"])
    return chosen["engine"], fastest["engine"], chosen["step_s"] / fastest["step_s"]


def _verdict(rows: list[Row]) -> str:
    chosen, fastest, ratio = verdict(rows)
    right = "within" if ratio <= WITHIN else "NOT within"
    return f"{rows[0]['case']}: predicted best {chosen}, measured best {fastest}, ratio {ratio:.3f} ({right} 5 %)"


def _line(row: Row) -> str:
    predicted = row["predicted_s"]
    told = f"predicted {1e3 * predicted:9.1f} ms ({predicted / row['step_s'] - 1:+.0%})" if predicted else ""
    held = row.get("held_bytes", 0) / 1e6
    sent = row.get("sent_bytes", 0) / 1e6
    return f"{row['case']:<14} {row['engine']:<18} {1e3 * row['step_s']:9.1f} ms {told} held {held:.1f} MB sent {sent:.2f} MB"


# --- the README's tables -----------------------------------------------------------------------------------


def tables(rows: list[Row]) -> list[str]:
    parts = []
    cases = list(dict.fromkeys(row["case"] for row in rows))
    for case in sorted(cases, key=lambda case: (case.endswith("accumulate"), case)):
        some = [row for row in rows if row["case"] == case]
        parts += [_title(case, some), _table(some), _sentence(some)]
    return [*parts, "Errors of the predicted step times:", _errors(rows)]


def _title(case: str, rows: list[Row]) -> str:
    link, ranks, *more = case.split("-")
    micro = ", four micro-batches a step" if more else ""
    speed = rows[0]["link_bytes_per_s"]
    measured = f" (measured: {speed / 1e6:,.0f} MB/s, {1e6 * rows[0]['link_latency_s']:,.0f} us a hop)" if speed else ""
    return f"**{ranks} ranks over {link}{micro}**{measured}; `ModelParallelStrategy` = 1.00:"


def _table(rows: list[Row]) -> str:
    columns = ["layout", "MB held", "MB sent", "predicted", "step ms", "predicted", "ratio"]
    body = []
    for row in rows:
        mine: Any = row["ratios"].get(BASELINE)
        predicted, sent = row["predicted_s"], row["predicted_bytes"]
        body.append(
            [
                LABELS.get(row["engine"], f"`{row['engine']}`"),
                f"{row['held_bytes'] / 1e6:.1f}" if "held_bytes" in row else "-",
                f"{row['sent_bytes'] / 1e6:.2f}" if "sent_bytes" in row else "-",
                f"{sent / 1e6:.2f}" if sent is not None else "-",
                f"{1e3 * row['step_s']:.1f}",
                f"{1e3 * predicted:.1f}" if predicted else "-",
                show_ratio(mine) if mine else "1.00",
            ]
        )
    return table(columns, body)


def _sentence(rows: list[Row]) -> str:
    chosen, fastest, ratio = verdict(rows)
    names = [LABELS.get(name, name) for name in (chosen, fastest)]
    right = "within 5 %" if ratio <= WITHIN else "**not within 5 %**"
    return f"Predicted best: {names[0]}. Measured best: {names[1]}. Ratio {ratio:.2f}, {right}."


def _errors(rows: list[Row]) -> str:
    body = []
    for case in dict.fromkeys(row["case"] for row in rows):
        ours = [row for row in rows if row["case"] == case and row["predicted_s"] and "fused" not in row["engine"]]
        errors = sorted(abs(row["predicted_s"] / row["step_s"] - 1) for row in ours)
        body.append([case, len(errors), f"{errors[len(errors) // 2]:.0%}", f"{errors[-1]:.0%}"])
    return table(["case", "plans", "median", "worst"], body)
