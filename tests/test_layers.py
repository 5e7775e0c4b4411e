"""The house rules a reader relies on: imports point one way, private names live in one place, files stay short."""

import ast
from collections.abc import Iterator
from pathlib import Path

import lightning_shard

PACKAGE = Path(lightning_shard.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = {file.relative_to(PACKAGE).with_suffix("").parts[0] for file in FILES}
PUBLIC_NAMES = lightning_shard._ROOMS

DECIDING = ("plans", "blocks", "specs", "hardware", "activations", "memory", "timing", "traffic", "planner")
"""Each may import those before it; none loads torch or Lightning when it is imported."""
ACTING = (
    "_compat",
    "plans",
    "blocks",
    "specs",
    "parallelize",
    "adapters",
    "pretrained",
    "checkpoint",
    "doctor",
    "strategies",
    "integrations",
)
"""Each may import those before it, so that no strategy can quietly plan again."""
SEE_BOTH = (
    "simulate",
    "strategies/facts",
    "strategies/auto_oom",
    "strategies/auto",
    "simulate",
    "probe",
    "report",
    "callbacks",
    "finetune",
    "cli",
)
"""Where the two arms meet: each may import everything but those after it and ``testing``."""
TESTING = ("_compat", "plans", "blocks", "specs")
"""What ``testing`` may import: it helps authors of any strategy, not of these alone."""
ANYWHERE = ("__init__", "__main__", "_registry")
"""They name things of every room and load them at first use."""

HEAVY = {"torch", "lightning", "pytorch_lightning", "transformers", "peft"}
HAVE_PRIVATE_NAMES = {"torch", "lightning", "lightning_fabric", "pytorch_lightning"}
DOCUMENTED = ("torch._foreach_", "torch.ops.aten._")
"""Underscored, and yet public: operators in torch's reference, and the names under which operators are dispatched."""
MAX_LINES = 400

Import = tuple[int, str]


def room_of(parts: tuple[str, ...]) -> str:
    """The room of a module of the package, from the parts of its name below the package."""
    pair = "/".join(parts[:2])
    return pair if pair in SEE_BOTH else parts[0]


def room_of_file(file: Path) -> str:
    return room_of(file.relative_to(PACKAGE).with_suffix("").parts)


def imported_room(name: str) -> str | None:
    """The room an import reaches into; None outside the package."""
    first, *rest = name.split(".")
    if first != "lightning_shard" or not rest or rest[0] == "__version__":
        return None
    return room_of(tuple(rest)) if rest[0] in ROOMS else PUBLIC_NAMES[rest[0]]


def allowed_for(room: str) -> set[str]:
    """The rooms a room may import."""
    if room == "testing":
        return set(TESTING)
    if room == "strategies":
        return {*ACTING, "strategies/auto"}  # its __init__ names them all
    if room in SEE_BOTH:
        return {*DECIDING, *ACTING, *SEE_BOTH[: SEE_BOTH.index(room)]}
    chains = [chain for chain in (DECIDING, ACTING) if room in chain]
    assert chains, f"{room} is a new room: say in this test which rooms it may import."
    return {earlier for chain in chains for earlier in chain[: chain.index(room)]}


def imports(tree: ast.AST) -> Iterator[Import]:
    """Line and full dotted name of everything imported anywhere below ``tree``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def imports_at_import_time(tree: ast.Module) -> Iterator[Import]:
    """Imports that run when the module is imported: not those in functions or for type checkers."""
    for node in tree.body:
        checks_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if not checks_types and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from imports(node)


def attributes(tree: ast.AST) -> Iterator[Import]:
    """Dotted names such as ``torch._dynamo.config``, used without an import of their own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.lineno, ast.unparse(node)


def private_names(tree: ast.AST) -> Iterator[Import]:
    for line, name in [*imports(tree), *attributes(tree)]:
        first, *rest = name.split(".")
        private = any(part.startswith("_") and not part.endswith("__") for part in rest)
        if first in HAVE_PRIVATE_NAMES and private and not name.startswith(DOCUMENTED):
            yield line, name


def parse(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def where(file: Path, line: int) -> str:
    return f"{file.relative_to(PACKAGE)}:{line}"


def test_there_is_something_to_check() -> None:
    rooms = {room_of_file(file) for file in FILES}
    assert {"plans", "specs", "parallelize", "strategies", "strategies/auto", "testing"} <= rooms


def test_imports_point_one_way() -> None:
    wrong = []
    for file in FILES:
        room = room_of_file(file)
        if room in ANYWHERE:
            continue
        for line, name in imports(parse(file)):
            other = imported_room(name)
            if other is not None and other != room and other not in allowed_for(room):
                wrong.append(f"{where(file, line)}: {room} may not import {other}")
    assert not wrong


def test_deciding_loads_neither_torch_nor_lightning() -> None:
    wrong = [
        f"{where(file, line)}: import {name} in the function that needs it"
        for file in FILES
        if room_of_file(file) in DECIDING
        for line, name in imports_at_import_time(parse(file))
        if name.split(".")[0] in HEAVY
    ]
    assert not wrong


def test_private_names_live_in_compat() -> None:
    wrong = [
        f"{where(file, line)}: {name} belongs in _compat, with the reason it is needed"
        for file in FILES
        if room_of_file(file) != "_compat"
        for line, name in private_names(parse(file))
    ]
    assert not wrong


def test_files_stay_short() -> None:
    lines = {str(file.relative_to(PACKAGE)): len(file.read_text().splitlines()) for file in FILES}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_the_checks_bite() -> None:
    tree = ast.parse(
        "import torch\nfrom lightning.fabric.utilities import _x\ntorch._dynamo.reset()\nimport torch._inductor\n"
        "import torch.nn\nfrom torch import __version__\ntorch._foreach_norm([])\n"
        "def late():\n    import peft\n"
    )
    assert {name for _, name in private_names(tree)} == {
        "lightning.fabric.utilities._x", "torch._dynamo.reset", "torch._dynamo", "torch._inductor",
    }  # fmt: skip
    assert "peft" not in {name for _, name in imports_at_import_time(tree)}
    assert "planner" not in allowed_for("strategies")
    assert "planner" in allowed_for("strategies/auto")
    assert not {"strategies", "_compat", "planner"} & allowed_for("memory")
