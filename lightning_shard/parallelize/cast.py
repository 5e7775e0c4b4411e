"""Compute in a narrow type while the FP32 master stays the parameter: FSDP's policy without FSDP.

During a unit's forward each master is shadowed by a cast of itself that autograd knows, so its gradient
arrives on the master in FP32. The parameter stays registered throughout: DDP, optimizers and state
dicts never see the cast.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from lightning_shard._compat import is_peft_wrapper
from lightning_shard.parallelize.storage import Places
from lightning_shard.parallelize.units import Units

ComputeTypes = dict[nn.Parameter, torch.dtype]


def places_of(root: nn.Module, compute_dtypes: ComputeTypes) -> Places:
    """Where below ``root`` the parameters of ``compute_dtypes`` are."""
    return {
        (module, name): compute_dtypes[parameter]
        for module in root.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter in compute_dtypes
    }


def require_castable(places: Places, root: nn.Module) -> None:
    """Raise ValueError for a place that an adapter takes over for the time of a forward.

    peft's adapters on bare parameters (``target_parameters``) register themselves as the parameter; a cast beside
    them would be read by nobody.
    """
    for name, module in root.named_modules():
        parameter, innermost = getattr(module, "parameter_name", None), getattr(module, "get_base_layer", None)
        if isinstance(parameter, str) and innermost is not None and (innermost(), parameter) in places:
            raise ValueError(
                f"{name} adapts the bare parameter {parameter!r}, which this plan keeps whole in FP32 and would have to "
                "cast for every forward; the two exclude each other. Use precision='bf16-true', load the base in bf16, "
                "or resident_blocks=0."
            )


class ComputeCast:
    """Casts the masters of some modules for the time of a forward. Nested uses share the outermost cast."""

    def __init__(self, modules: list[nn.Module], places: Places) -> None:
        self._places = [
            (module, name, places[module, name])
            for module in modules
            for name in module._parameters
            if (module, name) in places
        ]
        self._entered: list[list[tuple[nn.Module, str]]] = []

    def __bool__(self) -> bool:
        return bool(self._places)

    def enter(self) -> None:
        """Shadow the masters by their casts."""
        casts: dict[int, Tensor] = {}
        shadowed = []
        for owner, name, dtype in self._places:
            if name in owner.__dict__:
                continue  # an outer forward has cast it
            master = owner._parameters[name]
            assert master is not None
            # An entry in __dict__ is found before nn.Module looks among its parameters.
            owner.__dict__[name] = casts.setdefault(id(master), master.to(dtype))
            shadowed.append((owner, name))
        self._entered.append(shadowed)

    def exit(self) -> None:
        """Uncover what the matching :meth:`enter` shadowed."""
        for owner, name in self._entered.pop():
            owner.__dict__.pop(name, None)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The masters are shadowed inside this context."""
        self.enter()
        try:
            yield
        finally:
            self.exit()

    def hook(self, module: nn.Module, input_dtype: torch.dtype | None = None, *, masters: bool = True) -> list[Any]:
        """Cast floating inputs of ``module`` to ``input_dtype``, and (``masters``) its masters around each forward."""
        if not self:
            return []

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            if masters:
                self.enter()
            return cast_tensors(args, input_dtype), cast_tensors(kwargs, input_dtype)

        def after(*_: Any) -> None:
            self.exit()

        handles: list[Any] = [module.register_forward_pre_hook(before, with_kwargs=True)]
        return [*handles, module.register_forward_hook(after, always_call=True)] if masters else handles


def cast_by_unit(
    units: Units, places: Places, input_dtype: torch.dtype | None, recomputing: Sequence[nn.Module] = ()
) -> tuple[dict[nn.Module, ComputeCast], list[Any]]:
    """Install casts on every unit, and on each layer outside the units; returns each unit's cast and all hooks.

    The root's cast covers everything outside the units at once; the step methods run inside it. The layers
    have one each as well, for calls from elsewhere (``generate`` in a hook).
    """
    handles: list[Any] = []
    taken: set[int] = set()
    casts: dict[nn.Module, ComputeCast] = {}
    for _, unit in units.all():
        modules = list(unit.modules())
        taken.update(map(id, modules))
        casts[unit] = ComputeCast(modules, places)
        # A block that recomputes casts inside what it repeats, so that both passes run the same operations.
        handles += casts[unit].hook(unit, input_dtype, masters=unit not in recomputing)
    rest = [module for module in units.root.modules() if id(module) not in taken]
    for layer in rest:
        if layer is units.root or id(layer) in taken:
            continue
        # A peft layer looks at its adapters' types before it calls them: cast them together.
        parts = list(layer.modules()) if is_peft_wrapper(layer) else [layer]
        taken.update(map(id, parts))
        handles += ComputeCast(parts, places).hook(layer, input_dtype)
    root = ComputeCast(rest, places)
    casts[units.root] = root
    return casts, handles + root.hook(units.root)


def cast_tensors(values: Any, dtype: torch.dtype | None) -> Any:
    """Every floating tensor in nested ``values``, cast to ``dtype``; None changes nothing."""
    if dtype is None:
        return values
    return apply_to_collection(values, Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x)
