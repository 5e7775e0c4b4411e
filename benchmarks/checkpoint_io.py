"""Saving and resuming on two ranks: seconds, bytes on disk and host memory, against Lightning's strategies.

Each run saves twice, and the second save counts: the first makes groups and files' caches. ``async`` is the time for
which a save in the background stops training.
"""

import ctypes
import functools
import os
import shutil
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

PEER = "lightning-mp"
WAYS = (PEER, "lightning-ddp", "ours-fsdp2", "ours-ddp", "ours-fsdp2 async", "ours-ddp async")
RANKS = 2
REPEATS = 2


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
        row["save_over_peer"] = _ratio(runs, found[PEER], "save_s")
        if way.endswith(" async"):
            row["blocks_share"] = _ratio(runs, found[way.removesuffix(" async")], "save_s")
        else:
            row["resume_over_peer"] = _ratio(runs, found[PEER], "resume_s")
        rows.append(row)
        print(
            f"{case:<12} {way:<16} save {row['save_s']:.3f} s, resume {row['resume_s']:+.3f} s, "
            f"{row['file_bytes'] / 1e6:.2f} MB",
            flush=True,
        )
    return rows


def _ratio(runs: list[Any], others: list[Any], key: str) -> float:
    """Median over rounds: both were measured in each, one soon after the other."""
    return statistics.median(run[key] / other[key] for run, other in zip(runs, others, strict=True))


def measure(work: Work, folder: str, repeats: int) -> list[dict[str, Any]]:
    """What one rank measures: every way in turn. Resuming is from ``fit`` to the first step, less a fresh start."""
    rows = []
    for repeat in range(repeats + 1):
        for way in (*WAYS[repeat % len(WAYS) :], *WAYS[: repeat % len(WAYS)]):  # the order rotates
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
                wait: Any = getattr(trainer.strategy, "wait_for_save", lambda: None)
                trainer.save_checkpoint(path)
                wait()
                remove_whole(path)
                ctypes.CDLL(None).malloc_trim(0)  # what the first save has freed would hide what the second takes
                gauge = Gauge()
                trainer.save_checkpoint(path)
                dist.barrier()
                self.read = gauge.read()
                wait()

    watch = AtSecond()
    _fit(way, work, callbacks=[watch], max_steps=2)
    return watch.read


def remove_whole(path: str) -> None:
    """Remove the first save, so that the second replaces nothing under any strategy."""
    import torch.distributed as dist

    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
    dist.barrier()


def resume(way: str, work: Work, path: str | None) -> dict[str, float]:
    """From ``fit`` to the first step, with the checkpoint or without."""
    from lightning.pytorch import Callback

    class AtStart(Callback):
        read: dict[str, float]

        def on_train_start(self, *_: Any) -> None:
            self.read = gauge.read()

    watch = AtStart()
    ctypes.CDLL(None).malloc_trim(0)
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
        "ours-fsdp2 async": functools.partial(FSDP2Strategy, async_save=True),
        "ours-ddp async": functools.partial(TunedDDPStrategy, async_save=True),
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
        body = [[row["engine"], *_figures(row)] for row in some]
        columns = ["strategy", "training waits, ms", "ratio", "of the synchronous", "resume ms", "ratio", "MB on disk",
                   "MB more host memory, saving", "resuming"]  # fmt: skip
        parts += [f"**{case}**, two ranks; `ModelParallelStrategy` = 1.00:", table(columns, body)]
    return parts


def _figures(row: Row) -> list[str]:
    background = "blocks_share" in row
    share = f"{100 * row['blocks_share']:.0f} %" if background else "-"
    resumed = ["-", "-"] if background else [f"{1e3 * row['resume_s']:.0f}", f"{row['resume_over_peer']:.2f}"]
    memory = [f"{row['save_peak_bytes'] / 1e6:.0f}", "-" if background else f"{row['resume_peak_bytes'] / 1e6:.0f}"]
    saved = [f"{1e3 * row['save_s']:.0f}", f"{row['save_over_peer']:.2f}", share]
    return [*saved, *resumed, f"{row['file_bytes'] / 1e6:.2f}", *memory]
