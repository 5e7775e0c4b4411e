"""One row per GPU. Peaks are dense (no sparsity) with FP32 accumulation; TF32 stands under ``tf32``.

Rows are read top to bottom and the first whose words all occur in a device's name wins, so specific rows
come first. Every row names its source and the day it was read. ``efficiency`` is a planning value: what
training steps of public benchmarks reach of the peak (torchtitan 8B on H100 SXM 33-41 %, on A100 57 %; NeMo
AutoModel LoRA 402 of 989 TFLOP/s on H100).
"""

from lightning_shard.hardware.cluster import Device

GIB = 2**30
_T = 1e12
_READ = "as of 2026-11"


def _row(
    name: str,
    match: tuple[str, ...],
    gib: float,
    tb_per_s: float,
    half: float,
    single: float,
    link: str,
    source: str,
    *,
    tf32: float = 0.0,
    fp8: float = 0.0,
    efficiency: float = 0.4,
) -> Device:
    """A row from figures in TFLOP/s, TB/s and GiB."""
    flops = {"bfloat16": half * _T, "float16": half * _T, "float32": single * _T, "float64": single * _T / 2}
    extra = {"tf32": tf32 * _T, "float8_e4m3fn": fp8 * _T}
    return Device(
        name=name,
        match=match,
        memory_bytes=int(gib * GIB),
        memory_bytes_per_s=tb_per_s * 1e12,
        flops=flops | {key: value for key, value in extra.items() if value},
        efficiency=efficiency,
        intra_link=link,
        source=f"{source}, {_READ}",
    )


# fmt: off
GPUS: tuple[Device, ...] = (
    _row("gh200", ("gh200",), 96, 4.0, 989, 67, "nvlink4", "NVIDIA GH200 datasheet (96 GB HBM3)", tf32=494, fp8=1979),
    _row("b200", ("b200",), 180, 8.0, 2250, 75, "nvlink5",
         "NVIDIA DGX B200 datasheet, MLPerf 5.0 system files (180 GB)", tf32=1125, fp8=4500),
    _row("h200", ("h200",), 141, 4.8, 989, 67, "nvlink4", "NVIDIA H200 datasheet (SXM)", tf32=494, fp8=1979),
    _row("h100-nvl", ("h100", "nvl"), 94, 3.9, 835, 60, "nvlink4-pair",
         "NVIDIA H100 datasheet (NVL)", tf32=418, fp8=1671),
    _row("h100-pcie", ("h100", "pcie"), 80, 2.0, 756, 51, "pcie5", "NVIDIA H100 datasheet (PCIe)", tf32=378, fp8=1513),
    _row("h100-sxm", ("h100",), 80, 3.35, 989, 67, "nvlink4", "NVIDIA H100 datasheet (SXM5)", tf32=494, fp8=1979),
    _row("a100-40", ("a100", "40gb"), 40, 1.555, 312, 19.5, "nvlink3",
         "NVIDIA A100 datasheet (40 GB SXM4)", tf32=156, efficiency=0.5),
    _row("a100-80", ("a100",), 80, 2.039, 312, 19.5, "nvlink3",
         "NVIDIA A100 datasheet (80 GB SXM4)", tf32=156, efficiency=0.5),
    _row("l40s", ("l40s",), 48, 0.864, 362, 91.6, "pcie4", "NVIDIA L40S datasheet", tf32=183, fp8=733),
    _row("l4", ("l4",), 24, 0.3, 121, 30.3, "pcie4",
         "NVIDIA L4 datasheet (halves of the sparse figures)", tf32=60, fp8=242),
    _row("a10g", ("a10g",), 24, 0.6, 70, 35, "pcie4",
         "AWS G5 page, NVIDIA A10G datasheet as quoted there", tf32=35, efficiency=0.5),
    _row("rtx-pro-6000", ("rtx pro 6000",), 96, 1.792, 503, 125, "pcie5",
         "NVIDIA RTX PRO 6000 Blackwell datasheet and architecture paper", tf32=252, fp8=1007),
    _row("rtx-6000-ada", ("6000 ada",), 48, 0.96, 364, 91.1, "pcie4",
         "NVIDIA RTX 6000 Ada datasheet (halves of the sparse figures)", tf32=182, fp8=728),
    _row("rtx-5090", ("rtx 5090",), 32, 1.792, 209.5, 104.8, "pcie5",
         "NVIDIA RTX Blackwell architecture paper (FP32 accumulate)", tf32=104.8, fp8=419, efficiency=0.5),
    _row("rtx-4090", ("rtx 4090",), 24, 1.008, 165.2, 82.6, "pcie4-no-p2p",
         "NVIDIA Ada architecture paper (FP32 accumulate)", tf32=82.6, fp8=330.3, efficiency=0.5),
    _row("rtx-3090", ("rtx 3090",), 24, 0.936, 71.2, 35.6, "pcie4",
         "NVIDIA Ampere GA102 architecture paper (FP32 accumulate)", tf32=35.6, efficiency=0.5),
    _row("mi300x", ("mi300x",), 192, 5.3, 1307, 163.4, "xgmi-mi300x",
         "AMD MI300X datasheet", tf32=653.7, fp8=2614.9, efficiency=0.35),
    _row("mi250x", ("mi250x",), 64, 1.6, 191.5, 23.9, "xgmi-mi250x",
         "AMD MI250X datasheet, per GCD (half a card)", efficiency=0.4),
)
# fmt: on

HOST = Device(
    name="cpu",
    memory_bytes=4 * GIB,
    memory_bytes_per_s=2e10,
    flops={"float32": 8e10, "bfloat16": 4e10, "float16": 4e10, "float64": 4e10},
    efficiency=0.5,
    host_work_s=1.4e-3,
    intra_link="loopback",
    source="one AVX2 core at 2.5 GHz: two fused multiply-adds of 8 FP32 lanes a cycle (Intel and AMD optimization manuals)",
)
"""One process on one core of a host without accelerators. Detection measures memory and peak in its place
(:mod:`lightning_shard.hardware.host`). ``efficiency``: small Llamas of 7 to 135 M parameters reach 0.4 to 0.6 of the
product that is timed there. ``host_work_s``: what shards add to a step whose transfers weigh next to nothing, per
collective (benchmarks/README.md, nano-full-2: 21 ms for 14 of them, less their latency).
"""


def find_device(name: str) -> Device | None:
    """The row of a table name (``h100-sxm``) or of a driver's device name; None when it is not known."""
    words = name.strip().lower()
    if words == HOST.name:
        return HOST
    exact = next((row for row in GPUS if row.name == words), None)
    if exact is not None:
        return exact
    text = f" {words.replace('-', ' ').replace('_', ' ')} "
    return next((row for row in GPUS if all(_occurs(part, text) for part in row.match)), None)


def _occurs(part: str, text: str) -> bool:
    """Whole words, so that ``l4`` does not match an L40S."""
    return f" {part} " in text
