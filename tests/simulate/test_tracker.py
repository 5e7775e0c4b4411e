"""The tracker counts to the byte what can be worked out by hand."""

import gc

import pytest
import torch
from torch import nn

from lightning_shard._compat import fake_tensor_mode
from lightning_shard.simulate.tracker import Tracker

KIB = 1024


@pytest.fixture(params=["real", "fake"])
def mode(request: pytest.FixtureRequest) -> object:
    if request.param == "real":
        yield
    else:
        with fake_tensor_mode():
            yield


@pytest.mark.usefixtures("mode")
class TestTracker:
    def test_forward_and_backward_of_a_linear_layer(self) -> None:
        """Weight 64 x 128 FP32 = 32 KiB, input 16 x 128 = 8 KiB, output 16 x 64 = 4 KiB."""
        layer = nn.Linear(128, 64, bias=False)
        tracker = Tracker()
        tracker.adopt(layer.weight, "trained_weights")
        with tracker:
            with tracker.during("batch"):
                x = torch.ones(16, 128)
            output = layer(x)
            assert tracker.live_bytes == {"trained_weights": 32 * KIB, "batch": 8 * KIB, "activations": 4 * KIB}
            loss = output.sum()
            assert tracker.allocated_bytes == 44 * KIB + 512
            del output
            assert tracker.allocated_bytes == 40 * KIB + 512
            loss.backward()
            # The gradient of a sum is one expanded number: 512 bytes, made contiguous for the product: 4 KiB.
            assert tracker.live_bytes["backward"] == 32 * KIB
        assert tracker.allocated_bytes == 72 * KIB + 512
        assert tracker.peaks["setup"].allocated_bytes >= 72 * KIB + 512

    def test_views_and_in_place_operations_take_nothing(self) -> None:
        with Tracker() as tracker:
            x = torch.zeros(64, 64)
            x.view(-1)[:7].add_(1).t()
            x.t().mul_(2)
            assert tracker.allocated_bytes == 16 * KIB

    def test_sizes_are_rounded_up_to_512_bytes(self) -> None:
        with Tracker() as tracker:
            keep = [torch.zeros(1), torch.zeros(129)]
            assert tracker.allocated_bytes == 512 + 1024
            keep.clear()
            assert tracker.allocated_bytes == 0

    def test_resizing_a_storage_counts(self) -> None:
        with Tracker() as tracker:
            x = torch.zeros(256)
            x.untyped_storage().resize_(0)
            assert tracker.allocated_bytes == 0
            x.untyped_storage().resize_(4096)
            assert tracker.allocated_bytes == 4096

    def test_events_balance(self) -> None:
        with Tracker() as tracker:
            layer = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))
            layer(torch.ones(4, 32)).sum().backward()
            del layer
            gc.collect()
        alive: dict[int, int] = {}
        for tensor, size, _ in tracker.events:
            if size < 0:
                del alive[tensor]
            else:
                assert tensor not in alive
                alive[tensor] = size
        assert sum(alive.values()) == tracker.allocated_bytes == 0

    def test_streams_are_told_apart(self) -> None:
        with Tracker() as tracker:
            keep = [torch.zeros(1)]
            with torch.cpu.stream(torch.cpu.Stream()):
                keep.append(torch.zeros(1))
            keep.append(torch.zeros(1))
        assert [stream for _, _, stream in tracker.events] == [0, 1, 0]
        assert len(keep) == 3


def test_unanswerable_questions_are_answered_and_counted() -> None:
    with fake_tensor_mode(), Tracker() as tracker:
        x = torch.zeros(6)
        assert (x > 0).any()
        assert x.sum().item() == 1.0
        mask = torch.zeros(2, 3, dtype=torch.bool)
        assert torch.zeros(2, 3, 5)[mask].shape == (6, 5)
        assert mask.nonzero().shape == (6, 2)
        assert x.masked_select(x > 0).shape == (6,)
        assert tracker.guesses.count == 5


def test_a_mask_selects_in_backward_too() -> None:
    with fake_tensor_mode(), Tracker() as tracker:
        x = torch.zeros(4, 5, requires_grad=True)
        x[torch.zeros(4, dtype=torch.bool)].sum().backward()
        assert x.grad is not None
        assert x.grad.shape == (4, 5)
        assert tracker.guesses.count == 2


def test_real_values_are_not_guessed() -> None:
    with Tracker() as tracker:
        assert torch.tensor(3).item() == 3
        assert torch.zeros(2)[torch.tensor([True, False])].shape == (1,)
    assert tracker.guesses.count == 0
