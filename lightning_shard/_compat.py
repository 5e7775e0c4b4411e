"""Every private torch or Lightning name, and the choice of the Lightning namespace.

``lightning.pytorch`` and ``pytorch_lightning`` are separate packages with separate classes. A process
uses one of them: the one that is imported, ``lightning.pytorch`` where both or neither are.
Each private name carries the reason it is needed and when it can go.
"""

import importlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

__all__ = [
    "at_end_of_backward",
    "NAMESPACE",
    "DDPStrategy",
    "DoublePrecision",
    "HalfPrecision",
    "LightningModule",
    "MixedPrecision",
    "Precision",
    "Trainer",
    "TrainerFn",
    "evaluation_loaders",
    "fsdp_reset",
    "fsdp_root_init",
    "fsdp_watch_loss",
    "is_peft_wrapper",
    "isolate_rng",
    "train_loaders",
]

NAMESPACE = (
    "pytorch_lightning"
    if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    else "lightning.pytorch"
)


def _lightning(module: str) -> Any:
    return importlib.import_module(f"{NAMESPACE}.{module}")


if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
    from lightning.pytorch.utilities.seed import isolate_rng
else:
    LightningModule = importlib.import_module(NAMESPACE).LightningModule
    Trainer = importlib.import_module(NAMESPACE).Trainer
    DoublePrecision = _lightning("plugins.precision").DoublePrecision
    HalfPrecision = _lightning("plugins.precision").HalfPrecision
    MixedPrecision = _lightning("plugins.precision").MixedPrecision
    Precision = _lightning("plugins.precision").Precision
    DDPStrategy = _lightning("strategies").DDPStrategy
    TrainerFn = _lightning("trainer.states").TrainerFn
    isolate_rng = _lightning("utilities.seed").isolate_rng


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward in progress ends, before it returns to its caller.

    Gradients that travel while backward runs must be in before any hook sees them. Private because torch
    offers no public way to be called at that moment; can go when it does.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]


def fsdp_root_init(root: FSDPModule) -> None:
    """Make ``root`` the FSDP root now rather than at its first forward.

    FSDP2 takes whichever module runs first for the root, and a block that runs before the root (a user
    who calls ``self.model.generate`` in ``on_fit_start``) would lock the real root out. Private because
    there is no public way to name the root; can go when torch has one.
    """
    root._get_fsdp_state()._lazy_init()


def fsdp_watch_loss(root: FSDPModule, loss: torch.Tensor) -> None:
    """Have the root's gradients reduced at the end of the backward that starts from ``loss``.

    FSDP2 learns of a backward from the outputs of the root's forward. With manual optimization the
    backward runs before ``training_step`` returns, so the loss itself must tell. Can go when
    ``FSDPModule`` has a public pre-backward registration.
    """
    root._get_fsdp_state()._register_pre_backward_hook(loss)


def fsdp_reset(root: FSDPModule) -> None:
    """Put FSDP back to rest after an exception in forward or backward (public from torch 2.13)."""
    reset: Callable[[], None] | None = getattr(root, "reset_iter_state", None)
    if reset is not None:
        reset()


def train_loaders(trainer: "Trainer") -> Any:
    """The training data loaders before Lightning has set them up (a loader, or a collection of them).

    The plan is made in ``Strategy.setup``, before the fit loop loads its data; the loop's source is the
    one place that knows a loader passed to ``fit``, a datamodule and a module's own hook alike. Can go
    when ``Trainer`` offers the loaders before the run.
    """
    source = trainer.fit_loop._data_source
    return source.dataloader() if source.instance is not None and source.is_defined() else None


def evaluation_loaders(trainer: "Trainer") -> Any:
    """The same for a validate, test or predict run that comes before any fit."""
    loop = trainer.predict_loop if trainer.predicting else trainer._evaluation_loop
    source = loop._data_source
    return source.dataloader() if source.instance is not None and source.is_defined() else None


def is_peft_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` stands in for one of the user's layers (a LoRA layer, a ``modules_to_save`` copy)."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return False
    other = sys.modules["peft.utils.other"]
    wrappers = (tuners.BaseTunerLayer, other.AuxiliaryTrainingWrapper)
    return isinstance(module, wrappers)
