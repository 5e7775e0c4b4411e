"""The picture of the dial: ``python docs/draw_dial.py path/to/llama-3.1-8b docs/dial.png``. Figures are the planner's own."""

import sys

from matplotlib.figure import Figure

from lightning_shard import AdapterSpec, Cluster, ModelSpec, Plan, TrainSpec
from lightning_shard.hardware import LINKS, find_device
from lightning_shard.planner import estimate

DEVICES, GIB, GB = 8, 2**30, 1e9


def main(model_path: str, file: str) -> None:
    device = find_device("NVIDIA H100 80GB HBM3")
    assert device is not None
    train = TrainSpec(seq_len=4096, micro_batch_size=1, adapter=AdapterSpec(r=16))
    model = ModelSpec.from_pretrained(model_path).with_adapter(train.adapter)
    cluster = Cluster(
        devices_per_node=DEVICES,
        device=device,
        intra_link=LINKS[device.intra_link],
        inter_link=LINKS[device.intra_link],
    )
    blocks = model.num_blocks
    resident = list(range(blocks - 1, -1, -1))
    whole = Plan(dp_replicate=DEVICES, activation_checkpoint="full")
    plans = [whole] + [
        Plan(dp_shard=DEVICES, resident_blocks=count, adapters="replicated", activation_checkpoint="full")
        for count in resident
    ]
    found = [estimate(model, train, plan, cluster) for plan in plans]
    at = range(len(plans))

    figure = Figure(figsize=(8.5, 3.4), layout="constrained")
    memory = figure.subplots()
    traffic = memory.twinx()
    (left,) = memory.plot(
        at, [one.device_bytes / GIB for one in found], color="#33608c", label="memory per device, GiB"
    )
    (right,) = traffic.plot(
        at, [one.comm_bytes / GB for one in found], color="#b5503c", label="sent per device and step, GB"
    )
    memory.set_ylim(bottom=0)
    traffic.set_ylim(bottom=0)
    memory.set_ylabel("GiB")
    traffic.set_ylabel("GB")
    marks = [0, blocks // 4, blocks // 2, 3 * blocks // 4, blocks]
    names = [
        "DDP:\nall whole",
        *(f"{blocks - mark} of {blocks}\nblocks whole" for mark in marks[1:-1]),
        "FSDP2:\nall sharded",
    ]
    memory.set_xticks(marks, names)
    memory.legend(handles=[left, right], frameon=False, loc="center right")
    memory.set_title(
        f"Llama-3.1-8B, LoRA r16, activation checkpointing, {DEVICES} x H100: shard just enough", loc="left"
    )
    figure.savefig(file, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
