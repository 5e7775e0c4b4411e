"""Saving and resuming on two ranks: seconds, bytes on disk and host memory, against Lightning's strategies."""

import functools
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.launch import launch
from benchmarks.load import Gauge
from benchmarks.options import Options, Row
from benchmarks.report import table
from benchmarks.work import Work

WAYS = ("lightning-mp", "lightning-ddp", "ours-fsdp2", "ours-ddp")
RANKS = 2
REPEATS = 3


def run(options: Options) -> Iterator[list[Row]]:
    """Every way in turn, in full and with adapters."""
    size = "tiny" if options.smallest else "m"
    for training in ("full", "lora"):
        case = f"{size}-{training}"
        if options.wants(case):
            work = Work(size=size, training=training, rows=1, tokens=16, steps=3, device=options.device)
            yield [{"case": case, "training": training, **row} for row in _case(case, work, options)]


def _case(case: str, work: Work, options: Options) -> list[Row]:
    found: dict[str, list[Any]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
        by_rank = launch(RANKS, measure, work, folder, 1 if options.smallest else REPEATS)
    for runs in zip(*by_rank, strict=True):
        way = runs[0].pop("way")
        found[way].append({key: max(run[key] for run in runs) for key in runs[0]})
    rows = []
    for way, runs in found.items():
        row: Row = {"engine": way, **{key: statistics.median(run[key] for run in runs) for key in runs[0]}}
        rows.append(row)
        print(
            f"{case:<12} {way:<16} save {row['save_s']:.3f} s, resume {row['resume_s']:+.3f} s, "
            f"{row['file_bytes'] / 1e6:.2f} MB",
            flush=True,
        )
    return rows


def measure(work: Work, folder: str, repeats: int) -> list[dict[str, Any]]:
    """What one rank measures: every way in turn. Resuming is from ``fit`` to the first step, less a fresh start."""
    rows = []
    for repeat in range(repeats + 1):
        for way in WAYS:
            path = os.path.join(folder, f"{way}-{repeat}")
            saved, resumed, fresh = save(way, work, path), resume(way, work, path), resume(way, work, None)
            rows.append(
                {
                    "way": way,
                    "save_s": saved["seconds"],
                    "save_peak_bytes": saved["peak_bytes"],
                    "resume_s": resumed["seconds"] - fresh["seconds"],
                    "resume_peak_bytes": resumed["peak_bytes"] - fresh["peak_bytes"],
                    "file_bytes": _size(Path(path)),
                }
            )
    return rows[len(WAYS) :]  # the first round imports, and fills the file system's caches


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(f.stat().st_size for f in path.rglob("*") if f.is_file())


def save(way: str, work: Work, path: str) -> dict[str, float]:
    """Train two steps, then save."""
    import torch.distributed as dist
    from lightning.pytorch import Callback, Trainer

    class AtSecond(Callback):
        read: dict[str, float]

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == 2:
                gauge = Gauge()
                trainer.save_checkpoint(path)
                dist.barrier()
                self.read = gauge.read()

    watch = AtSecond()
    _fit(way, work, callbacks=[watch], max_steps=2)
    return watch.read


def resume(way: str, work: Work, path: str | None) -> dict[str, float]:
    """From ``fit`` to the first step, with the checkpoint or without."""
    from lightning.pytorch import Callback

    class AtStart(Callback):
        read: dict[str, float]

        def on_train_start(self, *_: Any) -> None:
            self.read = gauge.read()

    watch = AtStart()
    gauge = Gauge()
    _fit(way, work, callbacks=[watch], max_steps=3, ckpt_path=path)
    return watch.read


def _fit(way: str, work: Work, *, ckpt_path: str | None = None, **options: Any) -> None:
    import torch.distributed as dist
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from torch.utils.data import DataLoader

    from benchmarks.engines import BARE, Module, ShardedByHand
    from benchmarks.turns import Turn
    from benchmarks.work import batches
    from lightning_shard import FSDP2Strategy, TunedDDPStrategy

    strategies: dict[str, Any] = {
        "lightning-mp": functools.partial(ModelParallelStrategy, data_parallel_size=RANKS, tensor_parallel_size=1),
        "lightning-ddp": DDPStrategy,
        "ours-fsdp2": FSDP2Strategy,
        "ours-ddp": TunedDDPStrategy,
    }
    trainer = Trainer(strategy=strategies[way](), accelerator="cpu", devices=RANKS, **{**BARE, **options})
    module_class = ShardedByHand if way == "lightning-mp" else Module
    module = module_class(work, Turn([], 0, 1, work.device))
    data: Any = DataLoader([tokens[0] for tokens in batches(work, dist.get_rank())], batch_size=1)
    trainer.fit(module, data, ckpt_path=ckpt_path)


def tables(rows: list[Row]) -> list[str]:
    parts = []
    for case in dict.fromkeys(row["case"] for row in rows):
        some = [row for row in rows if row["case"] == case]
        body = [
            [row["engine"], f"{1e3 * row['save_s']:.0f}", f"{1e3 * row['resume_s']:.0f}", f"{row['file_bytes'] / 1e6:.2f}",
             f"{row['save_peak_bytes'] / 1e6:.0f}", f"{row['resume_peak_bytes'] / 1e6:.0f}"]
            for row in some
        ]  # fmt: skip
        columns = ["strategy", "save ms", "resume ms", "MB on disk", "MB more host memory, saving", "resuming"]
        parts += [f"**{case}**, two ranks:", table(columns, body)]
    return parts
