"""Seconds per step of every layout of four ranks on the network that is there, and which one the planner takes.

Started by tests/nodes/measure_plans.py under torchrun on two nodes of two ranks.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import lightning_shard
from lightning_shard import Cluster, ModelSpec, Plan, TrainSpec
from lightning_shard.hardware import HOST, find_link
from lightning_shard.integrations import launched
from lightning_shard.planner import choose
from lightning_shard.planner.considered import estimate
from lightning_shard.probe import measure_links
from lightning_shard.strategies.base import PlanStrategy

LENGTH, WARM_UP = 32, 1
LAYOUTS = ((4, 1), (2, 2), (1, 4))
"""(dp_replicate, dp_shard): DDP, HSDP with shards inside the node, and all sharded."""


class Decoder(LightningModule):
    """A Llama small enough for four ranks on two cores, its weights large against its work."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=256, intermediate_size=704, num_hidden_layers=10, num_attention_heads=4, num_key_value_heads=4,
            vocab_size=512, max_position_embeddings=LENGTH, attn_implementation="sdpa",
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        self.model = lightning_shard.lora(model, r=8, target_modules="all-linear") if kind == "lora" else model

    def training_step(self, batch: tuple[Tensor], index: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-4, fused=True)


class Fixed(PlanStrategy):
    """Runs one plan."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self._plan = plan

    def fixed_plan(self) -> Plan:
        return self._plan

    def choose_plan(self, trainer: Trainer) -> Plan:
        return self._plan


class Clock(Callback):
    """Seconds of each step, from barrier to barrier."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        dist.barrier()
        self.began = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        dist.barrier()
        self.seconds.append(time.perf_counter() - self.began)


def plans(kind: str) -> list[Plan]:
    """Every layout, with blocks freed or kept between forward and backward."""
    found = []
    for replicate, shard in LAYOUTS:
        if shard == 1:
            found.append(Plan(dp_replicate=replicate))
            continue
        adapters = "replicated" if kind == "lora" else "sharded"
        found += [
            Plan(dp_replicate=replicate, dp_shard=shard, reshard_after_forward=freed, adapters=adapters)
            for freed in (True, False)
        ]
    return found


def time_plan(kind: str, plan: Plan, steps: int) -> float:
    """The median step in seconds, after warm-up."""
    clock = Clock()
    tokens = torch.randint(0, 512, (4 * (steps + WARM_UP), LENGTH), generator=torch.Generator().manual_seed(1))
    trainer = Trainer(
        **launched(), strategy=Fixed(plan), accelerator="cpu", max_steps=steps + WARM_UP, logger=False, callbacks=[clock],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Decoder(kind), DataLoader(TensorDataset(tokens), batch_size=1))
    return statistics.median(clock.seconds[WARM_UP:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", choices=("full", "lora"), required=True)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    links = measure_links(2, torch.device("cpu"))
    seconds = {plan: time_plan(options.kind, plan, options.steps) for plan in plans(options.kind)}
    if dist.get_rank() == 0:
        model = ModelSpec.from_module(Decoder(options.kind))
        train = TrainSpec(
            micro_batch_size=1, seq_len=LENGTH, precision="32-true", optimizer_implementation="fused",
            gradients_cleared="before_backward",
        )  # fmt: skip
        cluster = links.apply(
            Cluster(
                num_nodes=2, devices_per_node=2, device=HOST, intra_link=find_link("loopback"), inter_link=find_link("eth10"),
                accelerator="cpu",
            )
        )  # fmt: skip
        needs = {plan: estimate(model, train, plan, cluster).device_bytes for plan in seconds}
        rows = []
        for memory in ("ample", "no room for a whole copy"):
            limit = 4 * 2**30 if memory == "ample" else min(n for p, n in needs.items() if p.dp_shard == 1) - 2**16
            room = Cluster.from_dict({**cluster.to_dict(), "device_memory_bytes": limit})
            chosen = choose(
                model, train, room, headroom=0.0, pin={"activation_checkpoint": "none", "resident_blocks": 0}
            ).plan
            fitting = {plan: s for plan, s in seconds.items() if needs[plan] <= limit}
            same = [p for p in fitting if (p.dp_replicate, p.dp_shard, p.reshard_after_forward) ==
                    (chosen.dp_replicate, chosen.dp_shard, chosen.reshard_after_forward)]  # fmt: skip
            rows.append(
                {
                    "memory": memory,
                    "chosen": chosen.to_dict(),
                    "chosen_s": fitting[same[0]] if same else None,
                    "fastest_s": min(fitting.values()),
                    "plans": [
                        {"dp_replicate": p.dp_replicate, "dp_shard": p.dp_shard, "reshard": p.reshard_after_forward,
                         "measured_s": s, "predicted_s": estimate(model, train, p, cluster).step_s}
                        for p, s in fitting.items()
                    ],
                }
            )  # fmt: skip
        assert links.inter is not None
        answer = {"kind": options.kind, "inter_bytes_per_s": links.inter.bytes_per_s, "choices": rows}
        options.out.write_text(json.dumps(answer))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
