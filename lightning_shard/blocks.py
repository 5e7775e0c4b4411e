"""Which parts of a module are its blocks: the units that are sharded, gathered, compiled and recomputed.

Works on any ``nn.Module`` through ``named_modules`` alone, so neither torch nor transformers is imported.
"""

from collections.abc import Iterator
from typing import Any

Named = tuple[str, Any]

LEAST_SHARE = 0.1
"""A repeated list counts as blocks from this share of the largest list's parameters on."""


def find_blocks(module: Any) -> list[Named]:
    """The blocks of a module, in order, with their names relative to it.

    1. The outermost modules whose class is named in some submodule's ``_no_split_modules``
       (transformers' own statement of what must stay together).
    2. Else the children of the largest list or sequence of equal modules, and of every other such list
       that is not inside it and holds at least a tenth as many parameters (an encoder beside a decoder).

    A block that can be reached by two names (``self.backbone = self.net.encoder``) is there once, by the first.
    Returns an empty list when neither finds any; callers say so and name the biggest group.
    """
    found: dict[int, Named] = {}
    for name, block in _outermost_no_split(module) or _repeated_children(module):
        found.setdefault(id(block), (name, block))
    return list(found.values())


def find_embedding(module: Any) -> Named | None:
    """The input embedding, where a submodule says which it is, with its name relative to the module."""
    return _asked(module, "get_input_embeddings")


def find_head(module: Any) -> Named | None:
    """The output head, where a submodule says which it is, with its name relative to the module."""
    return _asked(module, "get_output_embeddings")


def _outermost_no_split(module: Any) -> list[Named]:
    classes = {name for _, part in module.named_modules() for name in getattr(part, "_no_split_modules", None) or ()}
    return list(_outermost(module, lambda part: type(part).__name__ in classes)) if classes else []


def _outermost(module: Any, wanted: Any, prefix: str = "") -> Iterator[Named]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if wanted(child) and _num_parameters(child):
            yield path, child
        else:
            yield from _outermost(child, wanted, f"{path}.")


def _repeated_children(module: Any) -> list[Named]:
    lists = list(_outermost(module, _is_repeated))
    if _is_repeated(module):
        lists = [("", module)]
    if not lists:
        return []
    least = LEAST_SHARE * max(_num_parameters(part) for _, part in lists)
    return [
        (f"{name}.{child_name}".lstrip("."), child)
        for name, part in lists
        if _num_parameters(part) >= least
        for child_name, child in part.named_children()
    ]


def _is_repeated(module: Any) -> bool:
    """Two or more children of one class, all with parameters, in a container that only lists them."""
    if type(module).__name__ not in ("ModuleList", "Sequential"):
        return False
    children = [child for _, child in module.named_children()]
    return len(children) > 1 and len({type(child) for child in children}) == 1 and all(map(_num_parameters, children))


def _num_parameters(module: Any) -> int:
    return sum(int(parameter.numel()) for parameter in module.parameters())


def _asked(module: Any, question: str) -> Named | None:
    for _, part in module.named_modules():
        answer = _answer(part, question)
        if answer is not None:
            return next(((name, found) for name, found in module.named_modules() if found is answer), None)
    return None


def _answer(part: Any, question: str) -> Any | None:
    method = getattr(part, question, None)
    if not callable(method):
        return None
    try:
        return method()
    except (AttributeError, NotImplementedError, TypeError):  # transformers raises these where a model has none
        return None
