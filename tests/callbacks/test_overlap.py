"""The overlap report: spans that are known, and a real run."""

import dataclasses
from typing import Any

import pytest
import torch
from helpers.llama import TinyLlama, make_tokens

from lightning_shard import FSDP2Strategy
from lightning_shard.callbacks import OverlapReport
from lightning_shard.callbacks.overlap import Overlap, find_overlap
from lightning_shard.testing import ranks, run_trainer

CPU, CUDA = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]


@dataclasses.dataclass
class Range:
    start: float
    end: float


@dataclasses.dataclass
class Event:
    name: str
    time_range: Range
    device_type: Any = CPU


def event(name: str, start: float, end: float, device_type: Any = CPU) -> Event:
    return Event(name, Range(start, end), device_type)


def test_on_the_host_operators_hide_what_the_transport_does() -> None:
    events = [
        event("aten::mm", 0, 10),
        event("aten::add", 2, 4),
        event("c10d::allreduce_", 9, 30),
        event("gloo:all_reduce", 5, 15),
        event("gloo:all_reduce", 12, 30),
        event("aten::mul", 20, 24),
    ]
    overlap = find_overlap(events, 1)
    assert overlap.comm_s == pytest.approx(25e-6)
    assert overlap.hidden_s == pytest.approx(9e-6)
    assert overlap.exposed_s == pytest.approx(16e-6)
    assert find_overlap(events, 5).comm_s == pytest.approx(5e-6)


def test_on_a_device_kernels_hide_kernels() -> None:
    events = [
        event("aten::mm", 0, 100),
        event("gemm", 10, 20, CUDA),
        event("ncclDevKernel_AllReduce", 15, 40, CUDA),
        event("gemm", 30, 35, CUDA),
    ]
    overlap = find_overlap(events, 1)
    assert (overlap.comm_s, overlap.hidden_s) == (pytest.approx(25e-6), pytest.approx(10e-6))


def test_nothing_sent_is_nothing_exposed() -> None:
    overlap = find_overlap([event("aten::mm", 0, 1)], 1)
    assert (overlap.comm_s, overlap.hidden_share, overlap.exposed_s) == (0, 1.0, 0)
    assert str(Overlap(comm_s=0.01, hidden_s=0.004)) == (
        "communication 10.00 ms a batch, 40 % of it behind compute, 6.00 ms exposed"
    )


@pytest.mark.parametrize("strategy", ["auto-shard", FSDP2Strategy])
@ranks(2)
def test_a_run_is_profiled_once(strategy: Any) -> None:
    report = OverlapReport(after_batches=1, num_batches=2)
    run_trainer(TinyLlama, make_tokens, strategy=strategy, callbacks=[report], max_steps=5)
    assert report.overlap is not None
    assert report.overlap.comm_s > 0
    assert 0 <= report.overlap.hidden_s <= report.overlap.comm_s


@ranks(1)
def test_a_run_that_ends_first_reports_nothing() -> None:
    report = OverlapReport(after_batches=0, num_batches=9)
    run_trainer(TinyLlama, make_tokens, callbacks=[report], max_steps=2)
    assert report.overlap is None


def test_batches_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="num_batches=0 1 or more"):
        OverlapReport(num_batches=0)
