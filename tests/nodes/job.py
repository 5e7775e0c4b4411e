"""A training script for launchers: python -m torch.distributed.run ... job.py --out FOLDER [...]."""

import argparse
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from helpers.regression import WIDTH, Regression
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import AutoShardStrategy, FSDP2Strategy, TunedDDPStrategy
from lightning_shard.integrations import KeepGlobalBatch, SaveOnPreemption, launched

NUM_SAMPLES, MICRO_BATCH, GLOBAL_BATCH = 512, 2, 16


class Record(Callback):
    """One line of JSON per optimizer step, from rank 0: step, mean loss of the global batch, world, plan."""

    def __init__(self, out: Path, *, pause_s: float) -> None:
        self.file, self.pause_s, self.sum, self.count = out / "steps.jsonl", pause_s, 0.0, 0

    def on_train_batch_end(self, trainer: Trainer, module: object, outputs: dict, batch: object, index: int) -> None:
        self.sum, self.count = self.sum + float(outputs["loss"]), self.count + 1  # each is divided by their number
        if self.count < trainer.accumulate_grad_batches:
            return
        loss = float(trainer.strategy.reduce(torch.tensor(self.sum), reduce_op="mean"))
        self.sum, self.count = 0.0, 0
        if trainer.is_global_zero:
            line = {"step": trainer.global_step, "loss": loss, "world": trainer.world_size, "pid": os.getpid()}
            with self.file.open("a") as lines:
                lines.write(json.dumps({**line, "plan": trainer.strategy.plan.to_dict()}) + "\n")
        time.sleep(self.pause_s)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--strategy", default="auto-shard")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--pause-s", type=float, default=0.0)
    parser.add_argument("--timeout-s", type=float, default=60.0)
    parser.add_argument("--start-timeout-s", type=float, default=60.0)
    parser.add_argument("--num-nodes", type=int)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--device-memory", type=int)
    parser.add_argument("--fake-version")
    parser.add_argument("--save-on-preemption", action="store_true")
    options = parser.parse_args()
    if options.fake_version:
        import lightning_shard

        lightning_shard.__version__ = options.fake_version
    seed_everything(0)
    inputs = torch.randn(NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(2))
    data = DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=MICRO_BATCH, shuffle=True)
    waits = {
        "timeout": timedelta(seconds=options.timeout_s),
        "start_timeout": timedelta(seconds=options.start_timeout_s),
    }
    places = launched() if options.num_nodes is None else {"num_nodes": options.num_nodes, "devices": options.devices}
    trainer = Trainer(
        **places,
        accelerator="cpu",
        strategy={
            "auto-shard": lambda: AutoShardStrategy(device_memory=options.device_memory, **waits),
            "fsdp2": lambda: FSDP2Strategy(**waits),
            "hsdp": lambda: FSDP2Strategy(dp_shard=2, **waits),
            "ddp": lambda: TunedDDPStrategy(**waits),
        }[options.strategy](),
        max_steps=options.steps,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        callbacks=[
            KeepGlobalBatch(GLOBAL_BATCH),
            *([SaveOnPreemption()] if options.save_on_preemption else []),
            Record(options.out, pause_s=options.pause_s),
            ModelCheckpoint(dirpath=options.out / "checkpoints", every_n_train_steps=options.every, save_last=True),
        ],
    )
    trainer.fit(Regression(lr=0.02), data, ckpt_path="last")
    print(f"finished rank {trainer.global_rank} at step {trainer.global_step}", flush=True)


if __name__ == "__main__":
    main()
