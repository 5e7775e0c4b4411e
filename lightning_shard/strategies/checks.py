"""Faults that would train wrong numbers, found before they do."""

import difflib
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_shard._compat import DDPStrategy
from lightning_shard.parallelize.units import class_name
from lightning_shard.specs import DTYPE_BYTES, Precision


def require_known_options(name: str, options: Mapping[str, object]) -> None:
    """Raise TypeError for an option that neither Lightning's DDPStrategy nor torch's DistributedDataParallel takes."""
    classes = (DDPStrategy, DistributedDataParallel)
    known = {option for cls in classes for option in inspect.signature(cls.__init__).parameters}
    known -= {"self", "module", "kwargs"}
    unknown = sorted(set(options) - known)
    if unknown:
        close = difflib.get_close_matches(unknown[0], sorted(known), n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise TypeError(
            f"{name} has no option {', '.join(map(repr, unknown))}.{hint} Besides its own it takes those of Lightning's "
            f"DDPStrategy and torch's DistributedDataParallel: {', '.join(sorted(known))}."
        )


def asks_torch_ddp(options: Mapping[str, object]) -> bool:
    """Whether ``options`` hold any that only torch's DistributedDataParallel, or a hook into it, carries out."""
    usual = {"find_unused_parameters": False, "gradient_as_bucket_view": True, "static_graph": False}
    return any(value is not None and value != usual.get(name) for name, value in options.items() if name in _of_ddp())


def _of_ddp() -> set[str]:
    """Options that only torch's DistributedDataParallel, or a hook into it, has a use for."""
    hooks = {"ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"}
    return hooks.union(inspect.signature(DistributedDataParallel.__init__).parameters)


def require_script(num_ranks: int) -> None:
    """Raise RuntimeError in a notebook or an interactive Python: that is one process, and other ranks cannot join it."""
    if hasattr(sys, "ps1"):
        raise RuntimeError(
            f"{num_ranks} devices need {num_ranks} processes, and a notebook (or an interactive Python) is one. Write the "
            f"cells to a file (%%writefile train.py) and start it: !torchrun --nproc-per-node {num_ranks} train.py, or "
            "!python train.py, which starts its own processes. With devices=1 it runs here; planning does for any number."
        )


def require_no_ddp_options(name: str, options: Iterable[str]) -> None:
    """Raise TypeError for options that only DDP's reducer has a use for."""
    useless = sorted(_of_ddp() & set(options))
    if useless:
        raise TypeError(
            f"{name} has no use for {', '.join(useless)}: FSDP2 reduces block by block, whatever the blocks use, and has no "
            "buckets. Leave it out, or use TunedDDPStrategy."
        )


def require_names(methods: object) -> tuple[str, ...]:
    """``methods`` as a tuple of names. Raises TypeError for anything else, a single string included."""
    if isinstance(methods, (tuple, list)) and all(isinstance(name, str) for name in methods):
        return tuple(methods)
    raise TypeError(f"forward_methods={methods!r} must be a tuple of method names, such as ('encode',).")


def require_methods(module: nn.Module, names: Sequence[str]) -> None:
    """Raise ValueError for a forward method that the module does not have."""
    missing = [name for name in names if not callable(getattr(module, name, None))]
    if missing:
        raise ValueError(
            f"forward_methods names {', '.join(missing)}, which {class_name(module)} does not have. Give methods of the "
            "LightningModule."
        )


def require_trainable(module: nn.Module) -> None:
    """Raise RuntimeError when nothing in ``module`` trains."""
    if not any(p.requires_grad for p in module.parameters()):
        raise RuntimeError(
            f"{class_name(module)} has no trainable parameter: there is nothing to fit. Unfreeze a part of it, add "
            "adapters (lightning_shard.lora), or use trainer.validate / trainer.predict."
        )


def require_optimizers_over_module(optimizers: Sequence[Optimizer], module: nn.Module) -> None:
    """Raise RuntimeError when an optimizer holds parameters that the module no longer has.

    Sharding replaces parameters: an optimizer built from a list that was made before (in ``__init__``, say)
    would step tensors nobody computes with, and the loss would stay flat.
    """
    known = {id(p) for p in module.parameters()}
    for optimizer in optimizers:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        stale = [p for p in held if id(p) not in known]
        if stale:
            raise RuntimeError(
                f"{type(optimizer).__name__} holds {len(stale)} of {len(held)} parameters that are not (or no longer) "
                f"parameters of {class_name(module)}; the first has shape {tuple(stale[0].shape)}. They were collected "
                "before the module was sharded. Build the optimizer from self.parameters() inside configure_optimizers."
            )


def require_masters(module: nn.Module, precision: Precision) -> None:
    """Raise RuntimeError when something that trains is stored in a narrower type than a master copy."""
    least = DTYPE_BYTES[precision.master_dtype]
    narrow = [
        name
        for name, p in module.named_parameters()
        if p.requires_grad and p.is_floating_point() and p.element_size() < least
    ]
    if narrow:
        raise RuntimeError(
            f"{len(narrow)} parameters were unfrozen after they had been sharded in a narrow type, the first is "
            f"{narrow[0]!r}: small updates to them would be lost to rounding. Start with them trainable (freeze them in "
            "on_fit_start or later), or use precision='bf16-mixed' with a model loaded in FP32."
        )


def require_used(ddp: DistributedDataParallel) -> None:
    """Raise RuntimeError naming the trainable parameters that took no part in the last backward."""
    if ddp.find_unused_parameters or ddp.static_graph or not ddp.require_backward_grad_sync:
        return
    unused = [name for name, p in ddp.module.named_parameters() if p.requires_grad and p.grad is None]
    if unused:
        shown = ", ".join(unused[:10]) + (f" and {len(unused) - 10} more" if len(unused) > 10 else "")
        raise RuntimeError(
            f"{len(unused)} trainable parameters took no part in this step's loss, so their gradients were not reduced: "
            f"{shown}. Freeze them, use them in the loss, or pass TunedDDPStrategy(find_unused_parameters=True) when they "
            "are used in other steps."
        )


def require_manual_backward(optimizer: Optimizer, *, seen: bool) -> None:
    """Raise RuntimeError when manual optimization steps gradients that no ``manual_backward`` has averaged."""
    if not seen and any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
        raise RuntimeError(
            f"{type(optimizer).__name__}.step() was called on gradients that were not averaged over the ranks: the loss was "
            "sent backward by itself, so every rank would train its own copy. Call self.manual_backward(loss) instead of "
            "loss.backward()."
        )
