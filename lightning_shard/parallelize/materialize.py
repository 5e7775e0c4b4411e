"""From the meta device to real values: every tensor initialised, the same on every rank and topology.

Each module is initialised with a generator seeded by its own name, so the start depends neither on
how many ranks there are nor on which modules came before it. A tensor that nobody initialises is an
error, never whatever the memory held.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.parallelize.streaming import find_places
from lightning_shard.parallelize.together import gather, size_of
from lightning_shard.parallelize.weights import StoredTensor

_START = "_lightning_shard_start"
_LOADED = "_is_hf_initialized"
"""transformers' mark on what it has initialised or loaded, which its own rule then leaves alone."""


class Materializer:
    """Turns meta tensors below one root into initialised CPU tensors, keeping ties.

    Args:
        root: names are relative to this module.
        seed: the run's seed; with a module's name it determines that module's values.
        stream: leave on meta what has a source in files (:mod:`lightning_shard.parallelize.streaming` reads it later,
            once it is sharded), save for layers that others start from.
    """

    def __init__(self, root: nn.Module, seed: int, *, stream: bool = False) -> None:
        self._seed = seed
        now = {id(m) for layer in root.modules() for m in _starts_others(layer)}
        # By place: sharding exchanges the tensors, and a shard on meta still waits.
        self._files = {(id(module), name): source for module, name, source in find_places(root)}
        self._waiting = {place for place in self._files if stream and place[0] not in now}
        self._real: dict[int, Tensor] = {}
        self._sources: dict[int, StoredTensor] = {}
        self._keep_alive: list[Tensor] = []
        self._places = list(_walk(root, "", None))
        self._owners: dict[int, int] = {}
        for module, _, _ in self._places:
            for tensor in _own_tensors(module):
                self._owners.setdefault(id(tensor), id(module))

    def materialize(self, part: nn.Module) -> None:
        """Initialise everything below ``part`` that is still on the meta device.

        Raises:
            RuntimeError: when a module gives no way to initialise one of its tensors.
        """
        wanted = {id(module) for module in part.modules()}
        # A tied tensor gets its values from the first module that holds it, whichever is asked for first.
        shared = (id(t) for module in part.modules() for t in _own_tensors(module) if t.is_meta)
        wanted |= {self._owners[key] for key in shared if key in self._owners}
        places = [place for place in self._places if id(place[0]) in wanted]
        fresh = [(place, names) for place in places if (names := self._make_real(place[0]))]
        touched = {id(place[0]) for place, _ in fresh}
        made = {id(module) for (module, _, _), names in fresh if any(self._is_made(module, name) for name in names)}
        for module, name, owner in places:
            if id(module) in touched:
                if id(module) in made and _is_adapter_layer(module):
                    _start_adapter(module, self._seed, name)
                elif id(module) in made:
                    with seeded(*module.__dict__.get(_START, (self._seed, name))[:2]):
                        _initialise(module, owner)
                self._read(module)
            elif touched & {id(child) for child in module.modules()}:
                self._finish(module, name)
        for (module, name, _), names in fresh:
            _require_initialised(module, name, names)

    def _read(self, module: nn.Module) -> None:
        """Fill from files what has a source there."""
        for tensor in _own_tensors(module):
            source = self._sources.pop(id(tensor), None)
            if source is not None:
                source.read_into(tensor.detach())

    def _is_made(self, module: nn.Module, name: str) -> bool:
        """Whether a fresh tensor's values are made here rather than read."""
        return id(module._parameters.get(name, module._buffers.get(name))) not in self._sources

    def _finish(self, module: nn.Module, name: str) -> None:
        """What a peft wrapper knows better than the layers inside it, after those are initialised."""
        if _is_adapter_layer(module):
            _start_adapter(module, self._seed, name)
        elif hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
            _copy_original(module)

    def _make_real(self, module: nn.Module) -> list[str]:
        """Replace ``module``'s own meta tensors by poisoned real ones; returns their names."""
        names = []
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is None or not tensor.is_meta or (id(module), name) in self._waiting:
                    continue
                if id(tensor) not in self._real:
                    self._keep_alive.append(tensor)  # an id is only unique among the living
                    self._real[id(tensor)] = real = _poisoned_like(tensor)
                    source = self._files.get((id(module), name))
                    if source is not None:
                        self._sources[id(real)] = source
                    names.append(name)
                store[name] = self._real[id(tensor)]  # type: ignore[assignment]
        return names


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Random numbers inside depend on ``seed`` and ``name`` alone; the generators outside are untouched."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest, "little"))
        yield


def note_start(layer: nn.Module, seed: int, name: str, init: bool | str = True) -> None:
    """Say how a layer on the meta device starts: as one that was made from real tensors would."""
    layer.__dict__[_START] = (seed, name, init)


def agree_on_starts(root: nn.Module) -> None:
    """Have every layer start as rank 0 noted it: ranks may be seeded unlike. Collective where any has yet to start."""
    noted = {name: layer for name, layer in root.named_modules() if _START in layer.__dict__ and _waits(layer)}
    if not noted or size_of() == 1:
        return
    for name, start in gather({name: layer.__dict__[_START] for name, layer in noted.items()})[0].items():
        noted[name].__dict__[_START] = start


def _waits(layer: nn.Module) -> bool:
    return any(tensor.is_meta for tensor in itertools.chain(layer.parameters(), layer.buffers()))


@torch.no_grad()
def start_anew(model: nn.Module, names: Sequence[str], seed: int) -> None:
    """Have the tensors ``names`` of a transformers model start by its own rule, from numbers of their layer's name.

    Of a layer on the meta device it is noted. Other tensors of the same layer keep their values.
    """
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        layer = model.get_submodule(path)
        own = {f"{path}.{key}": t for key, t in itertools.chain(layer._parameters.items(), layer._buffers.items())}
        if any(tensor is not None and tensor.is_meta for tensor in own.values()):
            note_start(layer, seed, path)
            continue
        kept = {name: t.clone() for name, t in own.items() if t is not None and name not in names}
        for name in own.keys() & set(names):
            own[name].__dict__.pop(_LOADED, None)  # type: ignore[union-attr]
        with seeded(seed, path):
            _initialise(layer, model)
        for name, value in kept.items():
            own[name].copy_(value)  # type: ignore[union-attr]


def _start_adapter(layer: nn.Module, seed: int, name: str) -> None:
    seed, name, init = layer.__dict__.get(_START, (seed, name, True))
    with seeded(seed, name):
        initialise_adapter(layer, init)


def initialise_adapter(layer: Any, init: bool | str = True) -> None:
    """Give a peft LoRA layer its start: ``lora_A`` random, ``lora_B`` zero, a DoRA magnitude from the weights."""
    for adapter in list(layer.r):
        layer.reset_lora_parameters(adapter, init)
        if adapter in getattr(layer, "lora_magnitude_vector", {}) and adapter in layer.lora_A:
            _start_magnitude(layer, adapter)


def _start_magnitude(layer: Any, adapter: str) -> None:
    """Set DoRA's magnitude, shape (out,), to the row norms of the whole update, which start as the base's."""
    vector = layer.lora_magnitude_vector[adapter]
    parameter = vector.weight
    vector.update_layer(
        base_layer=layer.get_base_layer(),
        lora_A=layer.lora_A[adapter].weight,
        lora_B=layer.lora_B[adapter].weight,
        scaling=layer.scaling[adapter],
    )
    parameter.data = vector.weight.data.to(parameter.dtype)
    vector.weight = parameter  # the parameter that optimizers and ties know, with the new values


def _copy_original(wrapper: Any) -> None:
    """Start each trained copy of a layer (peft's ``modules_to_save``) from the layer itself."""
    for copy in wrapper.modules_to_save.values():
        copy.load_state_dict(wrapper.original_module.state_dict())


def _starts_others(layer: Any) -> Iterator[nn.Module]:
    """What other tensors start from, which must be whole when they do: DoRA's base, the original of a trained copy."""
    if _is_adapter_layer(layer) and len(getattr(layer, "lora_magnitude_vector", ())):
        yield from layer.get_base_layer().modules()
    elif hasattr(layer, "modules_to_save") and hasattr(layer, "original_module"):
        yield from layer.original_module.modules()


def _walk(module: nn.Module, name: str, owner: nn.Module | None) -> Iterator[tuple[nn.Module, str, nn.Module | None]]:
    """Children before parents, each with the transformers model that knows how to initialise it."""
    if callable(getattr(module, "_init_weights", None)) and hasattr(module, "config"):
        owner = module
    for child_name, child in module.named_children():
        yield from _walk(child, f"{name}.{child_name}" if name else child_name, owner)
    yield module, name, owner


def _initialise(module: nn.Module, owner: nn.Module | None) -> None:
    reset: Callable[[], None] | None = getattr(module, "reset_parameters", None) or getattr(
        module, "_reset_parameters", None
    )
    if reset is not None:
        reset()
    if owner is not None:
        with torch.no_grad():
            owner._init_weights(module)  # type: ignore[operator]


def _own_tensors(module: nn.Module) -> list[Tensor]:
    stores = itertools.chain(module._parameters.values(), module._buffers.values())
    return [tensor for tensor in stores if tensor is not None]


def _is_adapter_layer(module: nn.Module) -> bool:
    return hasattr(module, "reset_lora_parameters") and hasattr(module, "lora_A")


def _poisoned_like(tensor: Tensor) -> Tensor:
    real = torch.empty_like(tensor, device="cpu")
    if real.is_floating_point() or real.is_complex():
        real.fill_(float("nan"))
    elif real.dtype is not torch.bool:
        real.fill_(torch.iinfo(real.dtype).max)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(real, requires_grad=tensor.requires_grad)
    return real


def _require_initialised(module: nn.Module, module_name: str, names: list[str]) -> None:
    tensors = dict(itertools.chain(module._parameters.items(), module._buffers.items()))
    for name in names:
        tensor = tensors[name]
        if tensor is not None and _has_poison(tensor.detach()):
            raise RuntimeError(
                f"{module_name}.{name} is on the meta device and {type(module).__name__} gives no way to initialise "
                "it. Give the class a reset_parameters() that fills all its tensors, or build the module on the CPU."
            )


def _has_poison(tensor: Tensor) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.isnan().any())
    return tensor.dtype is not torch.bool and bool((tensor == torch.iinfo(tensor.dtype).max).any())
