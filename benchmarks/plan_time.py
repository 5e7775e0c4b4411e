"""Seconds of planning: the search for models and clusters of all sizes, and the command from its start."""

import dataclasses
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.options import Options, Row
from benchmarks.published import PLANNER_TESTS
from benchmarks.report import table
from lightning_shard import AdapterSpec, Cluster, ModelSpec, TrainSpec
from lightning_shard.hardware import find_device, link_between_nodes, link_inside_node
from lightning_shard.planner import choose

MODELS = ("qwen3-0.6b", "llama-3.1-8b", "mixtral-8x7b", "llama-3-70b")
DEVICES = (1, 8, 128, 1024)
REPEATS = 5


def run(options: Options) -> Iterator[list[Row]]:
    """Every model on every cluster, in full and with adapters; then the command in fresh interpreters."""
    models, devices = (MODELS[:1], DEVICES[:2]) if options.smallest else (tuple(options.chosen(MODELS)), DEVICES)
    with tempfile.TemporaryDirectory() as name:
        for model in models:
            spec = ModelSpec.from_pretrained(PLANNER_TESTS / "configs" / model)
            spec.save(Path(name, f"{model}.json"))
            for count in devices:
                yield [_search(spec, model, count, training, options) for training in ("full", "lora")]
        for model in models:
            yield [_command(Path(name, f"{model}.json"), model, options)]


def h100s(count: int) -> Cluster:
    """Nodes of eight H100."""
    device = find_device("h100-sxm")
    assert device is not None
    per_node = min(8, count)
    return Cluster(
        num_nodes=count // per_node,
        devices_per_node=per_node,
        device=device,
        intra_link=link_inside_node(device.intra_link),
        inter_link=link_between_nodes(device.intra_link),
    )


def _search(spec: ModelSpec, model: str, count: int, training: str, options: Options) -> Row:
    train = TrainSpec(seq_len=4096)
    if training == "lora":
        train = dataclasses.replace(train, adapter=AdapterSpec())
    times, considered = [], 0
    for _ in range(1 if options.smallest else REPEATS):
        start = time.perf_counter()
        decision = choose(spec, train, h100s(count))
        times.append(time.perf_counter() - start)
        considered = 1 + len(decision.rejected)
    row = {
        "case": f"{model}-{training}-{count}",
        "kind": "search",
        "model": model,
        "training": training,
        "devices": count,
        "seconds": statistics.median(times),
        "worst_s": max(times),
        "considered": considered,
        "fits": decision.fits,
    }
    print(f"{row['case']:<28} {row['seconds']:.3f} s, {considered} plans", flush=True)
    return row


def _command(spec: Path, model: str, options: Options) -> Row:
    command = [
        sys.executable,
        "-m",
        "lightning_shard",
        "plan",
        "--model",
        str(spec),
        "--devices",
        "8",
        "--device",
        "h100-sxm",
        "--json",
    ]
    times = []
    for _ in range(1 if options.smallest else REPEATS):
        start = time.perf_counter()
        subprocess.run(command, capture_output=True, check=False, cwd=Path(__file__).parent.parent)
        times.append(time.perf_counter() - start)
    row = {
        "case": f"{model}-command",
        "kind": "command",
        "model": model,
        "seconds": statistics.median(times),
        "worst_s": max(times),
    }
    print(f"{row['case']:<28} {row['seconds']:.3f} s", flush=True)
    return row


def tables(rows: list[Row]) -> list[str]:
    searches = [row for row in rows if row["kind"] == "search"]
    counts = sorted({row["devices"] for row in searches})
    body = []
    for model, training in dict.fromkeys((row["model"], row["training"]) for row in searches):
        of_job = {row["devices"]: row for row in searches if (row["model"], row["training"]) == (model, training)}
        cells = [f"{of_job[n]['seconds']:.3f} ({of_job[n]['considered']})" if n in of_job else "-" for n in counts]
        body.append([f"{model}, {training}", *cells])
    commands = [
        [row["model"], f"{row['seconds']:.2f}", f"{row['worst_s']:.2f}"] for row in rows if row["kind"] == "command"
    ]
    return [
        "Seconds of the search once the model's facts are known (and plans weighed), on so many H100:",
        table(["model", *map(str, counts)], body),
        "`lightning-shard plan` from a saved spec, eight devices, in a fresh interpreter, seconds:",
        table(["model", "median", "worst"], commands),
    ]
