"""Instruction pairs from the documentation of Python's standard library.

    python recipes/get_docs_pairs.py [--to runs/data/python-docs]

A question about a function or class, and its summary as the answer, in `train.jsonl` and `validation.jsonl`.
The sources are parsed, never imported, so nothing in them runs. The same Python gives the same files. A module
and all below it go to one of the two files, chosen by a hash of its name. Nothing is done where the folder is
there already.
"""

import argparse
import ast
import hashlib
import inspect
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from lightning_shard.checkpoint.atomic import whole_folder

TARGET = Path("runs/data/python-docs")
SKIPPED = {"__main__", "antigravity", "idlelib", "test", "tests", "this", "turtle", "turtledemo"}
"""Jokes, demonstrations and tests."""
RARE = {"distutils", "lib2to3", "tkinter"}
"""What not every installation has."""
VALIDATION_SHARE = 0.1
ANSWER_LENGTH = range(20, 301)
"""Characters: shorter summaries say nothing, longer ones are not summaries."""

Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Pair = dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=TARGET, help="folder to write")
    target: Path = parser.parse_args().to
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):  # several ranks may ask at once
        if not target.exists():
            write(target)


def write(target: Path) -> None:
    """Write both files."""
    splits: dict[str, list[Pair]] = {"train": [], "validation": []}
    for module, pair in collect():
        splits["validation" if is_validation(module) else "train"].append(pair)
    with whole_folder(target) as folder:
        for name, pairs in splits.items():
            pairs.sort(key=lambda pair: fraction(pair["prompt"]))  # so that the first rows are a fair sample
            lines = (json.dumps(pair, ensure_ascii=False) + "\n" for pair in pairs)
            (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    print(f"Wrote {len(splits['train']):,} training and {len(splits['validation']):,} validation pairs to {target}")


def collect() -> list[tuple[str, Pair]]:
    """Module and pair, for everything documented; of those with equal answers only the first is kept."""
    pairs: dict[str, tuple[str, Pair]] = {}
    for module, path in modules():
        for pair in pairs_of(module, path.read_text(encoding="utf-8", errors="replace")):
            pairs.setdefault(pair["completion"], (module, pair))
    return list(pairs.values())


def modules() -> Iterator[tuple[str, Path]]:
    """Name and source of each module of the standard library, in order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] in sys.stdlib_module_names and not (SKIPPED | RARE) & set(parts):
            yield ".".join(parts).removesuffix(".__init__"), path


def is_validation(module: str) -> bool:
    """Whether a module is kept for validation, with all that is in its package."""
    return fraction(module.partition(".")[0]) < VALIDATION_SHARE


def fraction(text: str) -> float:
    """A number from 0 to 1 that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def pairs_of(module: str, source: str) -> Iterator[Pair]:
    """A pair for each public function, class and method of a module that has a summary."""
    for name, node in documented(ast.parse(source).body):
        answer = summary(node)
        if len(answer) in ANSWER_LENGTH:
            yield {"prompt": question(module, name, node), "completion": answer}


def documented(body: list[ast.stmt], inside: str = "") -> Iterator[tuple[str, Documented]]:
    """Name and node of public definitions, those within classes included."""
    for node in body:
        if isinstance(node, Documented) and not node.name.startswith("_"):
            yield inside + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from documented(node.body, f"{inside}{node.name}.")


def summary(node: Documented) -> str:
    """First paragraph of the documentation, on one line."""
    text = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
    return " ".join(text.partition("\n\n")[0].split())


def question(module: str, name: str, node: Documented) -> str:
    """What to ask; methods show how they are called."""
    if isinstance(node, ast.ClassDef):
        return f"In Python's module `{module}`, what is the class `{name}`?"
    arguments = [argument.arg for argument in node.args.posonlyargs + node.args.args]
    arguments = [name for name in arguments if name not in ("self", "cls")]
    kind = "method" if "." in name else "function"
    return f"In Python's module `{module}`, what does the {kind} `{name}({', '.join(arguments)})` do?"


if __name__ == "__main__":
    main()
