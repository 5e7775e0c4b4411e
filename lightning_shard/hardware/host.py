"""How fast a process computes on this host: a product timed once, and the cores there are for so many processes.

Training on a host is for trying things out, yet a step time that is several times off spoils the first look at a plan.
Hosts differ too much for a table (vector width, clock, 16-bit units), so what is detected is measured; what is named
(``--device cpu``) is :data:`lightning_shard.hardware.HOST`, the same everywhere.
"""

import dataclasses
import functools
import math
import os
import time
from pathlib import Path

from lightning_shard.hardware.cluster import Device
from lightning_shard.hardware.gpus import HOST

SIZE = 512
"""Of the square products that are timed: a few milliseconds on one core, and large enough to be as fast as any."""
ROUNDS, ENOUGH_S = 5, 0.05
"""The fastest of so many products counts; no more are begun after so long."""
_CGROUP_QUOTAS = (
    ("/sys/fs/cgroup/cpu.max", None),
    ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
)


def measured_host(processes: int) -> Device:
    """The host as one of so many equal processes finds it.

    A product in one thread is timed, once per process. A rank computes with its threads on its share of the cores:
    where ranks are more than cores, each has part of one, for its products, its memory and its collectives' work.
    """
    cores = min(float(_threads()), usable_cores() / processes)
    part = min(1.0, cores)
    one = {dtype: product_flops(dtype) for dtype in ("float32", "bfloat16")}
    one |= {"float16": one["float32"] / 2, "float64": one["float32"] / 2}
    return dataclasses.replace(
        HOST,
        flops={dtype: flops * cores for dtype, flops in one.items()},
        memory_bytes_per_s=HOST.memory_bytes_per_s * part,
        host_work_s=HOST.host_work_s / part,
        source=f"measured: {one['float32'] / 1e9:.0f} GFLOP/s a core in FP32, {cores:.3g} cores a process",
    )


def usable_cores() -> float:
    """Cores that this process may use: those it is bound to, or its container's quota where that is less."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(float(bound), *map(_quota, *zip(*_CGROUP_QUOTAS, strict=True)))


def _quota(file: str, period_file: str | None) -> float:
    """Cores that a control group grants; infinity where it sets no limit."""
    words = [
        word for name in (file, period_file) if name and Path(name).is_file() for word in Path(name).read_text().split()
    ]
    numbers = [int(word) for word in words if word.isdigit()]
    return numbers[0] / numbers[1] if len(numbers) == 2 and min(numbers) > 0 else math.inf


@functools.cache
def product_flops(dtype: str) -> float:
    """FLOP/s of a square matrix product in one thread. One thread also leaves no pool that a fork would break."""
    import torch

    threads, elapsed = torch.get_num_threads(), 0.0
    torch.set_num_threads(1)
    try:
        matrix = torch.ones(SIZE, SIZE, dtype=getattr(torch, dtype))
        fastest_s = _time(matrix)  # the first one also sets the kernel up
        for _ in range(ROUNDS):
            fastest_s, elapsed = min(fastest_s, last := _time(matrix)), elapsed + last
            if elapsed > ENOUGH_S:
                break
    finally:
        torch.set_num_threads(threads)
    return 2 * SIZE**3 / fastest_s


def _time(matrix: object) -> float:
    start = time.perf_counter()
    matrix @ matrix  # type: ignore[operator]
    return time.perf_counter() - start


def _threads() -> int:
    import torch

    return torch.get_num_threads()
