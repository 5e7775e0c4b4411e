"""The first door: a ModelSpec from a live or meta module. Only iterates; imports neither torch nor transformers."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from lightning_shard.blocks import find_blocks, find_embedding, find_head
from lightning_shard.specs.adapter import AdapterSpec
from lightning_shard.specs.from_config import read_architecture
from lightning_shard.specs.model import ModelSpec, TensorSpec, UnitKind, UnitSpec
from lightning_shard.specs.split import layer_styles

BIG_LEAF_SHARE = 0.25
_LEAVES: dict[str, UnitKind] = {"Embedding": "embedding", "Linear": "head"}
ADAPTER_MARKS = ("lora_A", "lora_B", "lora_magnitude_vector", "lora_embedding_A", "lora_embedding_B")


def read_module(module: Any, *, name: str | None = None) -> ModelSpec:
    """A ModelSpec of any ``nn.Module``."""
    parameters = dict(module.named_parameters())
    if not parameters:
        raise ValueError(f"{type(module).__name__} has no parameters. Build it (configure_model) before planning.")
    config = _config(module)
    blocks = find_blocks(module)
    return ModelSpec(
        name=name or getattr(config, "_name_or_path", "") or type(module).__name__,
        family=str(getattr(config, "model_type", "unknown")),
        units=tuple(_units(module, parameters, blocks)),
        buffers_bytes=sum(int(buffer.numel() * buffer.element_size()) for buffer in _unique(module.buffers())),
        tied=tuple(_ties(module)),
        architecture=None if config is None else read_architecture(config),
        adapter=_adapter(module),
        tp_plan=_tp_plan(module),
        warnings=() if blocks else (_no_blocks(module, parameters),),
    )


def _units(module: Any, parameters: dict[str, Any], blocks: list[tuple[str, Any]]) -> Iterable[UnitSpec]:
    owners = {name: type(part).__name__ for name, part in module.named_modules()}
    left = dict(parameters)
    units = []
    for kind, name, part in _groups(module, blocks):
        taken = {key: left.pop(key) for key in list(left) if key.startswith(f"{name}.")}
        if taken:
            units.append(_unit(kind, name, type(part).__name__, taken, owners))
    yield from (_merge(list(run)) for _, run in groupby(units, key=_signature))
    if left:
        yield _unit("root", "", type(module).__name__, left, owners)


def _groups(module: Any, blocks: list[tuple[str, Any]]) -> list[tuple[UnitKind, str, Any]]:
    """Blocks, embedding and head; a block that holds the embedding (BERT's embeddings) is the embedding."""
    embedding, head = find_embedding(module), find_head(module)
    groups: list[tuple[UnitKind, str, Any]] = [
        ("embedding" if embedding and _inside(embedding[0], name) else "block", name, part) for name, part in blocks
    ]
    if embedding and not any(_inside(embedding[0], name) for name, _ in blocks):
        groups.append(("embedding", *embedding))
    if head and not any(_inside(head[0], name) for _, name, _ in groups):
        groups.append(("head", *head))
    return groups + list(_big_leaves(module, groups))


def _big_leaves(module: Any, groups: list[tuple[UnitKind, str, Any]]) -> Iterator[tuple[UnitKind, str, Any]]:
    """Look-up tables and linear layers outside the groups that are large beside a block: the engine gathers each
    alone. What comes after the blocks is a head, what comes before is treated like an embedding.
    """
    blocks = [name for kind, name, _ in groups if kind == "block"]
    least = BIG_LEAF_SHARE * max((_size(part) for kind, _, part in groups if kind == "block"), default=0)
    after = False
    for name, part in module.named_modules():
        after = after or any(_inside(name, block) for block in blocks)
        kind = _LEAVES.get(type(part).__name__)
        if kind is None or not blocks or _size(part) < least or any(_inside(name, group) for _, group, _ in groups):
            continue
        yield ("head" if kind == "head" and after else "embedding"), name, part


def _size(module: Any) -> int:
    return sum(int(parameter.numel()) for parameter in module.parameters())


def _inside(name: str, parent: str) -> bool:
    return name == parent or name.startswith(f"{parent}.")


def _unit(kind: UnitKind, name: str, module_class: str, parameters: dict[str, Any], owners: dict[str, str]) -> UnitSpec:
    prefix = f"{name}." if name else ""
    tensors = tuple(
        TensorSpec(
            name=key.removeprefix(prefix),
            shape=tuple(int(size) for size in parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            trainable=bool(parameter.requires_grad),
            adapter=any(mark in key for mark in ADAPTER_MARKS),
            owner=owners[key.rpartition(".")[0]],
        )
        for key, parameter in parameters.items()
    )
    return UnitSpec(kind=kind, names=(name,), tensors=tensors, module_class=module_class)


def _signature(unit: UnitSpec) -> tuple[object, ...]:
    return unit.kind, unit.module_class, unit.tensors


def _merge(run: list[UnitSpec]) -> UnitSpec:
    first = run[0]
    names = tuple(name for unit in run for name in unit.names)
    return UnitSpec(kind=first.kind, names=names, tensors=first.tensors, module_class=first.module_class)


def _ties(module: Any) -> Iterable[tuple[str, str]]:
    first: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) in first:
            yield first[id(parameter)], name
        else:
            first[id(parameter)] = name


def _unique(tensors: Iterable[Any]) -> Iterable[Any]:
    return {id(tensor): tensor for tensor in tensors}.values()


def _config(module: Any) -> Any | None:
    """The config of the outermost submodule that has one of transformers' kind."""
    configs = (getattr(part, "config", None) for _, part in module.named_modules())
    return next((config for config in configs if isinstance(getattr(config, "model_type", None), str)), None)


def _tp_plan(module: Any) -> tuple[tuple[str, str], ...]:
    """The plan of the outermost module whose own class has one (peft's wrapper answers for the model inside it)."""
    for _, part in module.named_modules():
        if hasattr(type(part), "tp_plan") and part.tp_plan:
            return layer_styles(part.tp_plan)
    return ()


def _adapter(module: Any) -> AdapterSpec | None:
    """What peft injected, read from the config it leaves on the model."""
    for _, part in module.named_modules():
        configs = getattr(part, "peft_config", None)
        if isinstance(configs, dict) and configs:
            found = next(iter(configs.values()))
            targets = getattr(found, "target_modules", None) or "all-linear"
            return AdapterSpec(
                method=_method(found),
                r=int(getattr(found, "r", 1)),
                alpha=float(getattr(found, "lora_alpha", 1)),
                dropout=float(getattr(found, "lora_dropout", 0.0)),
                target_modules=tuple(sorted(targets)) if not isinstance(targets, str) else "all-linear",
                modules_to_save=tuple(getattr(found, "modules_to_save", None) or ()),
            )
    return None


def _method(peft_config: Any) -> Any:
    if getattr(peft_config, "use_dora", False):
        return "dora"
    return "rslora" if getattr(peft_config, "use_rslora", False) else "lora"


def _no_blocks(module: Any, parameters: dict[str, Any]) -> str:
    sizes: dict[str, int] = {}
    for name, parameter in parameters.items():
        child = name.split(".")[0]
        sizes[child] = sizes.get(child, 0) + int(parameter.numel())
    biggest = max(sizes, key=lambda child: sizes[child])
    return (
        f"No repeated blocks were found in {type(module).__name__}, so all of it is one group when sharded; the "
        f"biggest part is {biggest!r} with {sizes[biggest]:,} parameters. Put its layers in an nn.ModuleList, or "
        "name the block classes in _no_split_modules."
    )
