"""Loading a pretrained model into two ranks: seconds and host memory, from ``fit`` to the first step.

The file is bf16 and the run FP32, so every way converts. Peaks are of resident memory, shared file pages included,
over what the process held before.
"""

import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.launch import launch
from benchmarks.options import Options, Row
from benchmarks.report import table

NAIVE = "naive, lightning-ddp"
WAYS = (NAIVE, "naive, lightning-mp", "accelerate-fsdp2", "ours-ddp", "ours-fsdp2")
RANKS = 2
REPEATS = 2
SHAPE = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16,
    "vocab_size": 32000, "max_position_embeddings": 64,
}  # fmt: skip
"""271 million parameters: 0.54 GB in bf16, 1.08 GB in FP32."""
SMALLEST = {**SHAPE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def run(options: Options) -> Iterator[list[Row]]:
    """Every way in turn, each in fresh processes."""
    with tempfile.TemporaryDirectory(prefix="load-") as folder:
        launch(1, make_model, folder, SMALLEST if options.smallest else SHAPE)
        ways = [way for way in (WAYS[::4] if options.smallest else WAYS) if options.wants(way)]
        found: dict[str, list[Any]] = {way: [] for way in ways}
        for _ in range(1 if options.smallest else REPEATS):
            for way in ways:
                found[way].append(launch(RANKS, load, way, folder))
        file_bytes = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
    rows = []
    for way, runs in found.items():
        row = {
            "case": way,
            "ranks": RANKS,
            "file_bytes": file_bytes,
            "seconds": statistics.median(max(rank["seconds"] for rank in ranks) for ranks in runs),
            "peak_bytes": statistics.median(max(rank["peak_bytes"] for rank in ranks) for ranks in runs),
        }
        rows.append(row)
        print(f"{way:<24} {row['seconds']:.2f} s, peak {row['peak_bytes'] / 1e6:,.0f} MB", flush=True)
    yield rows


def make_model(folder: str, shape: dict[str, int]) -> None:
    """Save a random Llama in bf16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**shape)).to(torch.bfloat16).save_pretrained(folder)


@dataclasses.dataclass
class Gauge:
    """Time and resident memory since it was made."""

    def __post_init__(self) -> None:
        import torch.distributed as dist

        dist.barrier()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        self.before, self.start = _status("VmRSS"), time.perf_counter()

    def read(self) -> dict[str, float]:
        return {"seconds": time.perf_counter() - self.start, "peak_bytes": _status("VmHWM") - self.before}


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def load(way: str, folder: str) -> dict[str, float]:
    """What one rank measures."""
    if way == "accelerate-fsdp2":
        return _accelerate(folder)
    return _trainer(way, folder)


def _trainer(way: str, folder: str) -> dict[str, float]:
    import torch
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM

    from benchmarks.engines import BARE, blocks_of
    from lightning_shard import FSDP2Strategy, TunedDDPStrategy
    from lightning_shard.finetune import CausalLM

    class Naive(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model: Any = None

        def configure_model(self) -> None:
            if self.model is None:
                self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
                if way.endswith("lightning-mp"):
                    mesh = self.device_mesh["data_parallel"]
                    for block in blocks_of(self.model):
                        fully_shard(block, mesh=mesh)
                    fully_shard(self.model, mesh=mesh)

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return self.model(**batch, use_cache=False).loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    class AtStart(Callback):
        read: dict[str, float]

        def on_train_start(self, *_: Any) -> None:
            self.read = gauge.read()

    strategies: dict[str, Any] = {
        NAIVE: DDPStrategy,
        "naive, lightning-mp": lambda: ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1),
        "ours-ddp": TunedDDPStrategy,
        "ours-fsdp2": FSDP2Strategy,
    }
    watch = AtStart()
    trainer = Trainer(
        strategy=strategies[way](), accelerator="cpu", devices=RANKS, max_steps=1, callbacks=[watch], **BARE
    )
    tokens = torch.zeros(8, dtype=torch.long)
    data: Any = DataLoader([{"input_ids": tokens, "labels": tokens}] * 2)
    module = CausalLM(folder) if way.startswith("ours") else Naive()
    gauge = Gauge()
    trainer.fit(module, data)
    return watch.read


def _accelerate(folder: str) -> dict[str, float]:
    import os

    import torch
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
    from transformers import AutoModelForCausalLM

    os.environ.update(ACCELERATE_USE_FSDP="true", FSDP_CPU_RAM_EFFICIENT_LOADING="true")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=True,
    )
    gauge = Gauge()
    accelerator = Accelerator(fsdp_plugin=plugin, cpu=True)
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.state.fsdp_plugin = plugin
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    return gauge.read()


def tables(rows: list[Row]) -> list[str]:
    naive = next(row for row in rows if row["case"] == NAIVE)
    body = [
        [row["case"], f"{row['seconds']:.2f}", f"{row['seconds'] / naive['seconds']:.2f}",
         f"{row['peak_bytes'] / 1e6:,.0f}", f"{row['peak_bytes'] / naive['peak_bytes']:.2f}"]
        for row in rows
    ]  # fmt: skip
    size = f"{naive['file_bytes'] / 1e9:.2f} GB"
    return [
        f"A file of {size} in bf16 into FP32, two ranks; loading on every rank, then `DDPStrategy` = 1.00:",
        table(["way", "seconds", "ratio", "peak MB per rank", "ratio"], body),
    ]
