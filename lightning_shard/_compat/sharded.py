"""Private names of torch and Lightning that sharded parameters and their gradients need, with reasons."""

import functools
import importlib
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_shard._compat import NAMESPACE

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
else:
    _callbacks = importlib.import_module(f"{NAMESPACE}.callbacks")
    BaseFinetuning = _callbacks.BaseFinetuning
    StochasticWeightAveraging = _callbacks.StochasticWeightAveraging
    WeightAveraging = _callbacks.WeightAveraging

__all__ = [
    "AVERAGING_METHODS",
    "AgreeingGradScaler",
    "averaged_copy",
    "compare_sharded_in_finetuning",
    "fsdp_note_use",
    "fsdp_parameters",
    "fsdp_take_off",
    "has_gradient_hooks",
    "has_compiled_parts",
    "scaler_before_step",
]


def fsdp_parameters(root: nn.Module) -> list[Any]:
    """FSDP2's own record of every parameter it shards below ``root``, each with a ``sharded_param``.

    While a unit is gathered its module shows the gathered copy, and there is no public way to the shard then. Can go
    when there is.
    """
    found = [each for _, state in _fsdp_states(root) for group in _fsdp_groups(state) for each in group.fsdp_params]
    return list(dict.fromkeys(found))


def _fsdp_states(root: nn.Module) -> list[tuple[nn.Module, Any]]:
    return [(module, module._get_fsdp_state()) for module in root.modules() if isinstance(module, FSDPModule)]


def _fsdp_groups(state: Any) -> list[Any]:
    groups = getattr(state, "_fsdp_param_groups", None)  # one group per module before torch 2.13
    groups = [state._fsdp_param_group] if groups is None else groups
    return [group for group in groups if group is not None]


def fsdp_take_off(root: nn.Module) -> None:
    """Have FSDP2 forget everything below ``root``: parameters stay the shards they are, in modules of their own classes.

    ``fully_shard`` can be applied once and has no inverse. Private because all that it leaves on a module is: its state
    and hooks, its mark, and the class that it puts before the module's own. A gather under way is not waited for, as
    the public ``reset_iter_state`` does: other ranks may never join it. Can go when torch takes it off itself.
    """
    for module, state in _fsdp_states(root):
        handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
        for group in _fsdp_groups(state):
            group._all_gather_result = None
            group._to_sharded()
            for mesh in (getattr(info, "mesh", None) for info in (group.mesh_info, group.post_forward_mesh_info)):
                _forget_groups(mesh)
            handles += group._module_to_pre_save_state_dict_hook_handle.values()
            handles += group._module_to_pre_load_state_dict_hook_handle.values()
            handles += [each._post_load_hook_handle for each in group.fsdp_params]
        for handle in handles:
            handle.remove()
        kept = module.__dict__
        kept[REGISTRY_KEY].pop("fully_shard")
        for key in [key for key, value in kept[STATE_KEY].items() if value is state]:
            kept[STATE_KEY].pop(key)
        del _module_state_mapping[module]
        module.__class__ = type(module).__mro__[2]  # FSDPLinear, FSDPModule, Linear
    for module in root.modules():
        for mark in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
            module.__dict__.pop(mark, None)


def _forget_groups(mesh: Any) -> None:
    """A mesh keeps its process groups alive (torch 2.13), and shards and optimizer state keep the mesh."""
    root = getattr(mesh, "_root_mesh", None) or mesh
    getattr(root, "_pg_registry", {}).clear()


def fsdp_note_use(parameter: Any, place: int, log: list[int]) -> None:
    """Have ``parameter.used`` and ``parameter.unused`` tell whether it joined reductions with a gradient, or with
    zeros in place of one it did not have; each time ``place`` is added to ``log``.

    Zeros become its gradient then, where on one process it has none and the optimizer skips it. FSDP2 asks for either
    through properties; only this record's class is changed. Can go when FSDP2 tells which parameters were unused.
    """
    parameter.used = parameter.unused = False
    parameter.place, parameter.reduced = place, log
    if hasattr(type(parameter), "unsharded_zero_grad_data"):
        parameter.__class__ = _noting_use(type(parameter))  # type: ignore[arg-type]


@functools.cache
def _noting_use(original: Any) -> Any:
    class NotesUse(original):  # type: ignore[misc]
        @property
        def unsharded_grad_data(self) -> torch.Tensor:
            _refuse_second_derivatives()
            self.used = True
            self.reduced.append(self.place)
            return super().unsharded_grad_data  # type: ignore[no-any-return]

        @property
        def unsharded_accumulated_grad_data(self) -> torch.Tensor:
            self.used = True
            self.reduced.append(self.place)
            return super().unsharded_accumulated_grad_data  # type: ignore[no-any-return]

        @property
        def unsharded_zero_grad_data(self) -> torch.Tensor:
            _refuse_second_derivatives()
            self.unused |= self.sharded_param.grad is None
            self.reduced.append(self.place)
            return super().unsharded_zero_grad_data  # type: ignore[no-any-return]

    return NotesUse


def _refuse_second_derivatives() -> None:
    # A backward that is itself recorded (create_graph=True) runs with gradients enabled, all others without.
    if torch.is_grad_enabled():
        raise RuntimeError(
            "A backward with create_graph=True ran through sharded blocks: FSDP2 frees their weights after it, so a "
            "second derivative (a gradient penalty) would read freed memory. Use a plan that keeps them whole: "
            "FSDP2Strategy(adapters='replicated', resident_blocks=...) or TunedDDPStrategy."
        )


class AgreeingGradScaler(torch.amp.GradScaler):
    """torch's scaler for gradients of any layout, whose decision to skip a step is the same on all ranks.

    A rank sees overflow in its own shards only. Private because torch's scaler has no other place to look at all
    gradients; can go when it takes whole and sharded ones together.
    """

    @classmethod
    def like(cls, scaler: torch.amp.GradScaler, device: str) -> "AgreeingGradScaler":
        """One with the settings and the scale of ``scaler``, which is between two steps."""
        fresh = cls(device, enabled=scaler.is_enabled())
        fresh.load_state_dict(scaler.state_dict())
        return fresh

    @override
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if parameter.grad is not None:
                part = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                by_kind.setdefault((part.device, part.dtype), []).append(part)
        for (device, _), parts in by_kind.items():
            found = torch.zeros((), device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(parts, found, inv_scale.to(device))
            found_inf = torch.maximum(found_inf, found.to(found_inf.device))
        if dist.is_initialized():
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}


def scaler_before_step(scaler: torch.amp.GradScaler) -> Callable[[], None]:
    """What puts ``scaler`` back to where it is now, also from the middle of a step.

    It remembers by itself which optimizers it has unscaled, and forgets that only at the end of a step. Can go when a
    step that failed can be done again.
    """
    state = scaler.state_dict()

    def restore() -> None:
        scaler.load_state_dict(state)
        scaler._per_optimizer_states.clear()

    return restore


AVERAGING_METHODS = ("_swap_models", "_copy_average_to_current", "update_parameters", "transfer_weights")
"""Methods in which Lightning's weight averaging callbacks read or write the trained parameters."""


def averaged_copy(callback: Any) -> Any:
    """The copy of the module that one of Lightning's weight averaging callbacks keeps; None for any other callback.

    The callbacks offer no way to it. Can go when they know sharded modules.
    """
    kinds = (WeightAveraging, StochasticWeightAveraging)
    return callback._average_model if isinstance(callback, kinds) else None


def compare_sharded_in_finetuning() -> None:
    """Let Lightning's finetuning callbacks compare parameters of any layout.

    They look by value for parameters that an optimizer has already, through a static method of the class, and torch
    refuses to compare a shard with another kind of tensor. Can go when Lightning compares by identity.
    """
    if getattr(BaseFinetuning.filter_on_optimizer, "knows_shards", False):
        return

    def filter_on_optimizer(optimizer: Any, params: Any) -> list[Any]:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        wanted = list(params)
        fresh = [param for param in wanted if not any(_same_value(p, param) for p in held)]
        if len(fresh) < len(wanted):
            warnings.warn(
                "Some parameters are in the optimizer already, or equal one that is, and are left out of the new group.",
                stacklevel=2,
            )
        return fresh

    filter_on_optimizer.knows_shards = True  # type: ignore[attr-defined]
    BaseFinetuning.filter_on_optimizer = staticmethod(filter_on_optimizer)  # type: ignore[method-assign]


def _same_value(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first is second or first.shape != second.shape:
        return first is second
    whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in (first, second)]
    return torch.equal(*whole)


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether somebody is to be called with a parameter's finished gradient. Can go when torch tells."""
    return bool(parameter._post_accumulate_grad_hooks)  # type: ignore[attr-defined]


def has_compiled_parts(module: nn.Module) -> bool:
    """Whether ``torch.compile`` was applied to ``module`` or a part of it, as a wrapper, in place, or to a method.

    Private because torch has no public question for it; can go when it does.
    """
    compiler = sys.modules.get("torch._dynamo")  # importing it takes seconds
    if compiler is None:
        return False
    wrapper = compiler.OptimizedModule

    def compiled(part: nn.Module) -> bool:
        methods = (hasattr(value, "_torchdynamo_orig_callable") for value in vars(part).values())
        return isinstance(part, wrapper) or part._compiled_call_impl is not None or any(methods)

    return any(map(compiled, module.modules()))
