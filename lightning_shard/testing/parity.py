"""Train the same thing under several layouts and compare: a layout must never change what is learned."""

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.data import Sampler
from typing_extensions import override

from lightning_shard._compat import NAMESPACE, LightningModule, Trainer
from lightning_shard.testing.collectives import Collectives, count_collectives

if TYPE_CHECKING:
    from lightning.pytorch import Callback
    from lightning.pytorch.strategies import Strategy
else:
    Callback = importlib.import_module(NAMESPACE).Callback

WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
"""What activation checkpointing and compilation put into parameter names."""

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,  # Lightning's would shuffle, even where the loader does not
}


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run learned, as plain full tensors."""

    losses: tuple[float, ...]
    """Loss of every training batch, averaged over the ranks."""
    parameters: dict[str, torch.Tensor]
    """Every trained parameter at the end, whole."""
    collectives: tuple[Collectives, ...]
    """What this rank sent for every training batch."""


class GlobalBatchSampler(Sampler[list[int]]):
    """This rank's part of the same global batches for any number of ranks, in order, never shuffled."""

    def __init__(self, num_samples: int, global_batch_size: int, *, rank: int, world_size: int) -> None:
        if global_batch_size % world_size:
            raise ValueError(f"global_batch_size={global_batch_size} must be a multiple of world_size={world_size}.")
        self._starts = range(0, num_samples - global_batch_size + 1, global_batch_size)
        self.batch_size = global_batch_size // world_size
        """Samples per batch of this rank."""
        self._offset = rank * self.batch_size

    @override
    def __iter__(self) -> Iterator[list[int]]:
        for start in self._starts:
            first = start + self._offset
            yield list(range(first, first + self.batch_size))

    def __len__(self) -> int:
        return len(self._starts)


def run_trainer(
    make_module: Callable[[], LightningModule],
    make_data: Callable[[int, int], Any],
    *,
    strategy: "str | Callable[[], Strategy]" = "auto",
    callbacks: Sequence[Callback] = (),
    **trainer_options: Any,
) -> RunResult:
    """Fit on this rank, as one of those of the process group, and gather what was learned.

    Args:
        make_module: makes the module; the same weights whenever it is called.
        make_data: makes what ``Trainer.fit`` takes as its data, from a rank and the number of ranks. See
            :class:`GlobalBatchSampler`.
        strategy: a registered name, or something to call that gives a strategy.
        callbacks: more callbacks.
        trainer_options: passed on to ``Trainer``; a quiet run without files on CPU is the default.
    """
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    recorder = _Recorder()
    trainer = Trainer(
        strategy=strategy if isinstance(strategy, str) else strategy(),
        callbacks=[recorder, *callbacks],
        **{**QUIET, "devices": world_size, **trainer_options},
    )
    module = make_module()
    trainer.fit(module, make_data(rank, world_size))
    return RunResult(
        losses=_averaged(recorder.losses, world_size),
        parameters=trained_parameters(module),
        collectives=tuple(recorder.collectives),
    )


def trained_parameters(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every trainable parameter as a full tensor on CPU, by its plain name. All ranks must call it."""
    return {_plain_name(name): _full(value) for name, value in module.named_parameters() if value.requires_grad}


def assert_parity(
    actual: RunResult, expected: RunResult, *, rtol: float = 1e-5, loss_rtol: float | None = None
) -> None:
    """Raise unless two runs had the same losses and ended with the same trained parameters.

    A parameter agrees when no element is off by more than ``rtol`` times the largest element of the tensor,
    a loss when it is off by no more than ``loss_rtol`` (``rtol`` by default) times itself.

    Raises:
        AssertionError: naming what differs, and by how much.
    """
    if len(actual.losses) != len(expected.losses):
        raise AssertionError(f"{len(actual.losses)} batches were trained on, {len(expected.losses)} were expected.")
    loss_rtol = rtol if loss_rtol is None else loss_rtol
    for index, (loss, wanted) in enumerate(zip(actual.losses, expected.losses, strict=True)):
        if not abs(loss - wanted) <= loss_rtol * abs(wanted):
            raise AssertionError(f"Loss of batch {index}: {loss!r} instead of {wanted!r} (rtol {loss_rtol:g}).")
    if actual.parameters.keys() != expected.parameters.keys():
        odd = sorted(actual.parameters.keys() ^ expected.parameters.keys())
        raise AssertionError(f"Trained in one of the runs only: {', '.join(odd)}.")
    errors = {name: _relative_error(actual.parameters[name], wanted) for name, wanted in expected.parameters.items()}
    wrong = {name: error for name, error in errors.items() if not error <= rtol}
    if wrong:
        lines = "\n".join(f"  {name}: {error:.2e}" for name, error in sorted(wrong.items(), key=lambda item: -item[1]))
        raise AssertionError(f"{len(wrong)} of {len(errors)} parameters differ by more than rtol {rtol:g}:\n{lines}")


class _Recorder(Callback):
    """Losses and collectives of every training batch."""

    def __init__(self) -> None:
        self.losses: list[torch.Tensor] = []
        self.collectives: list[Collectives] = []
        self._counting = ExitStack()

    @override
    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.collectives.append(self._counting.enter_context(count_collectives()))

    @override
    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *_: Any) -> None:
        self._counting.close()
        if outputs:  # Lightning divides the loss by the number of accumulated batches
            self.losses.append(outputs["loss"].double() * trainer.accumulate_grad_batches)

    @override
    def on_exception(self, *_: Any) -> None:
        self._counting.close()


def _averaged(losses: list[torch.Tensor], world_size: int) -> tuple[float, ...]:
    if not losses:
        return ()
    values = torch.stack(losses)
    if world_size > 1:
        dist.all_reduce(values)
    return tuple((values / world_size).tolist())


def _full(value: torch.Tensor) -> torch.Tensor:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach().cpu().clone()


def _plain_name(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return float("inf")
    difference = (actual.double() - expected.double()).abs().max()
    scale = expected.double().abs().max()
    return float(difference / scale) if difference > 0 else 0.0
