"""Faults that would train wrong numbers, found before they do."""

import difflib
import inspect
import sys
from collections.abc import Mapping, Sequence

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_shard._compat import DDPStrategy
from lightning_shard.plans import Plan
from lightning_shard.specs import Precision


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
    hooks = {"ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"}
    only_ddp = hooks.union(inspect.signature(DistributedDataParallel.__init__).parameters)
    return any(value is not None and value != usual.get(name) for name, value in options.items() if name in only_ddp)


def require_script(num_ranks: int) -> None:
    """Raise RuntimeError in a notebook or an interactive Python: that is one process, and other ranks cannot join it."""
    if hasattr(sys, "ps1"):
        raise RuntimeError(
            f"{num_ranks} devices need {num_ranks} processes, and a notebook (or an interactive Python) is one. Write the "
            f"cells to a file (%%writefile train.py) and start it: !torchrun --nproc-per-node {num_ranks} train.py, or "
            "!python train.py, which starts its own processes. With devices=1 it runs here; planning does for any number."
        )


def require_trainable(module: nn.Module) -> None:
    """Raise RuntimeError when nothing in ``module`` trains."""
    if not any(p.requires_grad for p in module.parameters()):
        raise RuntimeError(
            f"{type(module).__name__} has no trainable parameter: there is nothing to fit. Unfreeze a part of it, add "
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
                f"parameters of {type(module).__name__}; the first has shape {tuple(stale[0].shape)}. They were collected "
                "before the module was sharded. Build the optimizer from self.parameters() inside configure_optimizers."
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


def require_supported_precision(plan: Plan, precision: Precision) -> None:
    """Raise ValueError for a precision that a sharded plan cannot run."""
    if plan.strategy == "fsdp2" and precision.name == "16-mixed":
        raise ValueError(
            "precision='16-mixed' needs a gradient scaler whose decision agrees on all shards, which sharded plans do "
            "not have yet. Use precision='bf16-mixed' or 'bf16-true'."
        )
