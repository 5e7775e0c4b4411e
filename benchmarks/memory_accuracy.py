"""Predicted memory against measured: published runs, other tools' estimators, and this machine's own steps.

python -m benchmarks run memory_accuracy [--simulate]     every published row through `lightning-shard plan`
python -m benchmarks run memory_accuracy --device cuda    what this GPU allocates and reserves, beside the plan
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script: the folder above is where the benchmarks are imported from
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import fsdp1_step, litgpt_step, memory_measured
from benchmarks.estimators import peer_estimate
from benchmarks.options import Options, Row
from benchmarks.published import Models, Published, plan, published
from benchmarks.report import table

GB = 1e9


def run(options: Options) -> Iterator[list[Row]]:
    """One row per published figure; with ``--device cuda`` one per job measured there."""
    if options.device == "cuda":
        yield from memory_measured.run(options)
        return
    rows = []
    if options.simulate and litgpt_step.litgpt_version() is None:
        print(f"{litgpt_step.MISSING}: the steps of its {len(litgpt_step.jobs())} rows are left out")
    with Models() as models:
        every = published()[:2] if options.smallest else published()
        for each in every:
            if options.wants(each.id):
                rows.append(_judge(each, models, simulate=options.simulate))
                print(_line(rows[-1]), flush=True)
                yield rows[-1:]
    if options.wants("measured"):
        yield from memory_measured.run(options)
    _summary(rows)


def _judge(each: Published, models: Models, *, simulate: bool) -> Row:
    row: Row = {
        "case": each.id,
        "kind": "published",
        "source": each.source,
        "metric": each.metric,
        "measured_gb": each.measured_gb,
        "left_out": each.left_out,
    }
    if each.arguments is None:
        return row
    answer = plan(each, models)
    estimate = answer["estimate"]
    row |= {
        "arguments": each.arguments,
        "predicted_gb": estimate[each.metric] / GB,
        "predicted_device_gb": estimate["device_bytes"] / GB,
        "peak_at": estimate["peak_at"],
        "fits": answer["fits"],
        "left_out": each.left_out or impossible(each.measured_gb * GB, estimate["terms"]),
    }
    if each.nvidia_smi_bytes:
        row["nvidia_smi_gb"] = each.nvidia_smi_bytes / GB
    if simulate and not each.left_out:
        start = time.perf_counter()
        simulated = plan(each, models, simulate=True)["estimate"]
        row |= {
            "simulated_gb": simulated[each.metric] / GB,
            "simulated_reserved_gb": simulated["reserved_bytes"] / GB,
            "simulated_device_gb": simulated["device_bytes"] / GB,
            "simulated_s": time.perf_counter() - start,
        }
        row |= _with_the_code_that_ran(each, row, models)
    folder, job = models.folder(each.model), fsdp1_step.job_of(each)
    if simulate and job is not None and folder is not None and each.metric == "reserved_bytes":
        row |= {"matching_gb": fsdp1_step.reserved(job, folder) / GB, "matching": "torch's FSDP1"}
    if folder is not None:
        devices = answer["decision"]["plan"]
        peers = peer_estimate(folder, "bfloat16", devices["dp_replicate"] * devices["dp_shard"])
        row |= {
            "accelerate_gb": peers.accelerate_bytes / GB,
            "zero2_gb": peers.zero2_bytes / GB,
            "zero3_gb": peers.zero3_bytes / GB,
            "deepspeed": peers.deepspeed,
        }
    return row


def _with_the_code_that_ran(each: Published, row: Row, models: Models) -> Row:
    """Simulated with litgpt's own step or torch's FSDP1 where those ran; the other jobs ran what ``--simulate`` does."""
    sharded, job = fsdp1_step.job_of(each), litgpt_step.jobs().get(each.id)
    if sharded is not None:
        folder = models.folder(each.model)
        assert folder is not None
        return {"matching_gb": fsdp1_step.simulated(sharded, folder) / GB, "matching": "torch's FSDP1"}
    if job is None:
        return {"matching_gb": row["simulated_gb"]}
    version = litgpt_step.litgpt_version()
    if version is None:
        return {}
    return {"matching_gb": litgpt_step.simulated(job).allocated_bytes / GB, "matching": f"litgpt {version}"}


AT_REST = ("frozen_weights", "trained_weights", "optimizer_state")


def impossible(measured_bytes: float, terms: dict[str, int]) -> str:
    """Why a figure cannot be right: it is below what parameters and optimizer state alone take; empty if it can."""
    floor = sum(terms.get(name, 0) for name in AT_REST)
    if measured_bytes >= floor:
        return ""
    return f"impossible: parameters and optimizer state alone take {floor / GB:.2f} GB"


def error(row: Row, name: str, measured: str = "measured_gb") -> float | None:
    """Relative error of a prediction; None where either figure is missing."""
    return row[name] / row[measured] - 1 if row.get(name) is not None and row.get(measured) else None


def errors(rows: list[Row], name: str, measured: str = "measured_gb", *, all_rows: bool = False) -> list[float]:
    """Absolute errors of the rows that count."""
    counted = [row for row in rows if row["kind"] == "published" and (all_rows or not row["left_out"])]
    return [abs(e) for row in counted if (e := error(row, name, measured)) is not None]


def _line(row: Row) -> str:
    parts = [f"{row['case']:<48} measured {row['measured_gb']:7.2f} GB"]
    for name in ("predicted_gb", "simulated_gb", "matching_gb"):
        if name in row:
            parts.append(f"{name.removesuffix('_gb')} {row[name]:7.2f} ({error(row, name):+6.1%})")
    if "fits" in row:
        parts.append("fits" if row["fits"] else "DOES NOT FIT")
    return "  ".join([*parts, row["left_out"]])


def _summary(rows: list[Row]) -> None:
    for name in ("predicted_gb", "simulated_gb", "matching_gb"):
        found = errors(rows, name)
        if found:
            print(f"{name}: median {statistics.median(found):.1%}, worst {max(found):.1%} of {len(found)} rows counted")


# --- the README's tables -----------------------------------------------------------------------------------


def tables(rows: list[Row]) -> list[str]:
    for row in rows:
        if row["case"] not in litgpt_step.jobs() and "simulated_gb" in row:
            row.setdefault("matching_gb", row["simulated_gb"])
    counted = [row for row in rows if row["kind"] == "published" and not row["left_out"]]
    others = [row for row in rows if row["kind"] == "published" and row["left_out"]]
    parts = ["Published runs, GB of live tensors at the peak (`max_memory_allocated`):", _accuracy(counted)]
    parts += ["Median and worst absolute error, all tools on the same rows:", _side_by_side(counted)]
    smi = [row for row in counted if "nvidia_smi_gb" in row]
    parts += ["The whole device against `nvidia-smi`:", _device(smi)] if smi else []
    parts += ["Shown, not counted:", _left_out(others)] if others else []
    return parts + memory_measured.tables([row for row in rows if row["kind"] == "measured"])


def _accuracy(rows: list[Row]) -> str:
    columns = ["run", "measured", "plan", "error", "simulated", "error", "the code that ran", "error", "the plan says"]
    body = [
        [
            row["case"],
            _gb(row, "measured_gb"),
            _gb(row, "predicted_gb"),
            _percent(error(row, "predicted_gb")),
            _gb(row, "simulated_gb"),
            _percent(error(row, "simulated_gb")),
            _gb(row, "matching_gb"),
            _percent(error(row, "matching_gb")),
            _verdict(row),
        ]
        for row in rows
    ]
    return table(columns, body)


TOOLS = (
    ("`lightning-shard plan`", "predicted_gb", lambda row: True),
    ("`lightning-shard plan --simulate`", "simulated_gb", lambda row: True),
    ("simulated with the code that ran", "matching_gb", lambda row: True),
    ("`accelerate estimate-memory`, full training", "accelerate_gb", lambda row: "lora" not in row["case"]),
    ("`accelerate estimate-memory`, LoRA (which it does not know)", "accelerate_gb", lambda row: "lora" in row["case"]),
    ("DeepSpeed ZeRO-2, full training", "zero2_gb", lambda row: "lora" not in row["case"]),
    ("DeepSpeed ZeRO-2, LoRA (which it does not know)", "zero2_gb", lambda row: "lora" in row["case"]),
    ("DeepSpeed ZeRO-3, full training", "zero3_gb", lambda row: "lora" not in row["case"]),
    ("DeepSpeed ZeRO-3, LoRA (which it does not know)", "zero3_gb", lambda row: "lora" in row["case"]),
)  # fmt: skip


def _side_by_side(rows: list[Row]) -> str:
    body = []
    for label, name, chosen in TOOLS:
        found = errors([row for row in rows if chosen(row)], name)
        if found:
            body.append([label, len(found), f"{statistics.median(found):.1%}", f"{max(found):.1%}"])
    sources = sorted({row["deepspeed"] for row in rows if "deepspeed" in row})
    note = f"DeepSpeed's figures: {', '.join(sources)}. Neither tool takes batch, length, adapters or recomputation."
    return f"{table(['tool', 'rows', 'median', 'worst'], body)}\n\n{note}"


def _device(rows: list[Row]) -> str:
    names = ("predicted_device_gb", "simulated_device_gb")
    body = [
        [row["case"], _gb(row, "nvidia_smi_gb"), *_both(row, names[0]), *_both(row, names[1])]
        for row in rows
    ]  # fmt: skip
    for name, label in zip(names, ("plan", "simulated"), strict=True):
        found = errors(rows, name, "nvidia_smi_gb")
        if found:
            body.append([f"{label}: median {statistics.median(found):.1%}, worst {max(found):.1%}", *[""] * 5])
    return table(["run", "nvidia-smi", "plan", "error", "simulated", "error"], body)


def _both(row: Row, name: str) -> tuple[str, str]:
    return _gb(row, name), _percent(error(row, name, "nvidia_smi_gb"))


def _left_out(rows: list[Row]) -> str:
    body = [
        [row["case"], row["metric"].removesuffix("_bytes"), _gb(row, "measured_gb"), _gb(row, "predicted_gb"),
         _percent(error(row, "predicted_gb")), _verdict(row) if "fits" in row else "-", row["left_out"]]
        for row in rows
    ]  # fmt: skip
    return table(["run", "metric", "measured", "plan", "error", "the plan says", "why not counted"], body)


def _verdict(row: Row) -> str:
    return "fits" if row["fits"] else "**does not fit**"


def _gb(row: Row, name: str) -> str:
    return f"{row[name]:.2f}" if row.get(name) is not None else "-"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"


if __name__ == "__main__":
    from benchmarks.__main__ import main

    entry: Callable[[list[str]], Any] = main
    sys.exit(entry(["run", "memory_accuracy", *sys.argv[1:]]))
