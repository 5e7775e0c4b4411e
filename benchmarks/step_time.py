"""Seconds of a training step: ours against raw PyTorch loops, Lightning's strategies, accelerate and transformers.

Cases are named SIZE-TRAINING-RANKS: ``s-lora-2``. ``nano`` shows the fixed cost of a step, ``s`` and ``m`` what is
left of it where a step computes for 100 ms and more.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from benchmarks.compare import compare
from benchmarks.options import Options, Row
from benchmarks.report import table
from benchmarks.work import Work, build

ONE = ("raw", "ours", "lightning", "raw-fsdp2", "lightning-mp")
REPLICATED = ("raw-ddp", "ours-ddp", "ours-ddp+fused", "lightning-ddp", "hf-trainer")
SHARDED = ("lightning-mp", "ours-fsdp2", "ours-fsdp2+fused", "raw-fsdp2", "accelerate-fsdp2")
RESIDENT = ("ours-r0", "ours-r0+fused", "ours-r4", "ours-r4+fused", "ours-r8", "ours-r8+fused")
"""With adapters: sharded with replicated adapters, and half and all of the eight blocks resident besides."""
FEW = ("lightning-ddp", "ours-ddp", "lightning-mp", "ours-fsdp2")
"""Where all engines at once would take more memory than this machine has."""
SHAPES = {"nano": (2, 32), "s": (2, 128), "m": (2, 128), "tiny": (2, 16), "1b": (2, 2048), "3b": (1, 2048)}
"""Rows and tokens of a micro-batch."""
STEPS = {"nano": 60, "s": 14, "m": 8, "tiny": 5, "1b": 16, "3b": 12}
STEPS_ALONE = {**STEPS, "s": 40}
"""Of one rank, where a hundredth is at stake."""
WARM_UP = 3
CASES = tuple(
    f"{size}-{training}-{ranks}" for size in ("nano", "s", "m") for training in ("full", "lora") for ranks in (1, 2, 4)
)

CUDA_CASES = ("nano-full-1", "nano-lora-1", "1b-full-1", "1b-lora-1", "3b-lora-1")
"""One GPU; more of them run the cases of the host as well."""


def run(options: Options) -> Iterator[list[Row]]:
    """All engines of every case, in turn."""
    cases = ("tiny-full-1", "tiny-lora-2") if options.smallest else CUDA_CASES if options.device == "cuda" else CASES
    for case in options.chosen(cases):
        size, training, ranks = case.split("-")
        yield _case(case, size, training, int(ranks), options)


def _case(case: str, size: str, training: str, ranks: int, options: Options) -> list[Row]:
    num_rows, tokens = SHAPES[size]
    steps = (STEPS if ranks > 1 else STEPS_ALONE)[size]
    work = Work(size=size, training=training, rows=num_rows, tokens=tokens, steps=steps, device=options.device)
    if options.device == "cuda" and size in ("1b", "3b"):
        work = dataclasses.replace(work, precision="bf16-mixed")
    measured = compare(work, names_of(size, training, ranks), ranks, warm_up=WARM_UP)
    facts = {"case": case, "training": training, "size": size, "ranks": ranks, "tokens": num_rows * tokens}
    rows = [{**facts, **row, **_use_of_peak(work, row)} for row in measured]
    for row in rows:
        print(f"{case:<12} {row['engine']:<20} {1e3 * row['step_s']:8.2f} ms  (spread {row['spread']:.0%})", flush=True)
    return rows


def _use_of_peak(work: Work, row: Row) -> dict[str, float]:
    """MFU and tokens per second of a GPU that the hardware table knows."""
    if work.device != "cuda":
        return {}
    import torch

    from lightning_shard import Cluster, ModelSpec, Plan, TrainSpec
    from lightning_shard.planner import estimate

    with torch.device("meta"):
        spec = ModelSpec.from_module(build(work))
    train = TrainSpec(micro_batch_size=work.rows, seq_len=work.tokens, precision=work.precision)
    predicted = estimate(spec, train, Plan(), Cluster.detect(devices=1))
    return {
        "predicted_s": predicted.step_s,
        "mfu": predicted.mfu * predicted.step_s / row["step_s"],
        "tokens_per_s": train.tokens / row["step_s"],
    }


def names_of(size: str, training: str, ranks: int) -> list[str]:
    """The engines of a case."""
    if ranks == 1:
        return list(ONE)
    if size == "m" and ranks == 4:
        return list(FEW)
    resident = RESIDENT if training == "lora" and size in ("s", "m") else ("ours-r0",) if training == "lora" else ()
    sharded = [name for name in SHARDED if not (training == "lora" and name == "ours-fsdp2+fused")]
    units = ("raw-units",) if size == "nano" else ()
    return [*REPLICATED, *sharded, *units, *resident]


# --- the README's tables -----------------------------------------------------------------------------------


def tables(rows: list[Row]) -> list[str]:
    parts = []
    for title, baseline, names, wanted in (
        ("One rank; the raw loop = 1.00:", "raw", ONE, lambda row: row["ranks"] == 1),
        ("Replicated; Lightning's `DDPStrategy` = 1.00:", "lightning-ddp", REPLICATED, lambda row: row["ranks"] > 1),
        ("Sharded; `ModelParallelStrategy` with the user's own `fully_shard` = 1.00:", "lightning-mp",
         (*SHARDED, *RESIDENT), lambda row: row["ranks"] > 1),
    ):  # fmt: skip
        some = [row for row in rows if wanted(row)]
        if some:
            parts += [title, _ratios(some, baseline, names)]
    return [*parts, "Fixed cost of a step over the raw loop of the same layout, nano model:", _fixed_cost(rows)]


def _ratios(rows: list[Row], baseline: str, names: tuple[str, ...]) -> str:
    cases = sorted({row["case"] for row in rows}, key=_order)
    present = [name for name in names if any(row["engine"] == name for row in rows)]
    body = [[f"{case}, {baseline} ms", *_times(rows, case, baseline, present)] for case in cases]
    return table(["case", *present], body)


def _times(rows: list[Row], case: str, baseline: str, names: list[str]) -> list[str]:
    of_case = {row["engine"]: row for row in rows if row["case"] == case}
    cells = []
    for name in names:
        row = of_case.get(name)
        if row is None:
            cells.append("-")
        elif name == baseline:
            cells.append(f"{1e3 * row['step_s']:.1f} ms")
        else:
            cells.append(show_ratio(row["ratios"][baseline]))
    return cells


def show_ratio(found: dict[str, float]) -> str:
    """The median, and the quarter points around it where they are more than a tenth apart."""
    low, high = found["ratio_q1"], found["ratio_q3"]
    return f"{found['ratio']:.2f}" + (f" ({low:.2f}-{high:.2f})" if high - low > 0.1 else "")


def _order(case: str) -> tuple[int, str, str]:
    size, training, ranks = case.split("-")
    return ("tiny", "nano", "s", "m", "1b", "3b").index(size), training, ranks


def _fixed_cost(rows: list[Row]) -> str:
    pairs = (("ours", "raw"), ("lightning", "raw"), ("ours-ddp", "raw-ddp"), ("lightning-ddp", "raw-ddp"),
             ("hf-trainer", "raw-ddp"), ("ours-fsdp2", "raw-units"), ("lightning-mp", "raw-fsdp2"))  # fmt: skip
    body = []
    for case in sorted({row["case"] for row in rows if row["size"] == "nano"}, key=_order):
        of_case: dict[str, Any] = {row["engine"]: row for row in rows if row["case"] == case}
        for mine, raw in pairs:
            if mine in of_case and raw in of_case:
                extra = of_case[mine]["extra_s"][raw]
                body.append(
                    [f"{case}: {mine} over {raw}", f"{1e3 * of_case[raw]['step_s']:.2f}", f"{1e3 * extra:+.2f}"]
                )
    return table(["case", "raw ms", "more ms"], body)
