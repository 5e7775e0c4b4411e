"""The instruction pairs of the quickstart: enough, deterministic, and split by module."""

import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def recipe() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(RECIPES / "get_docs_pairs.py")))


@pytest.fixture(scope="module")
def written(recipe: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """The folder of the pairs, and what was imported to make them."""
    folder, before = tmp_path_factory.mktemp("pairs") / "docs", set(sys.modules)
    recipe.write(folder)
    return folder, set(sys.modules) - before


@pytest.fixture(scope="module")
def files(written: tuple[Path, set[str]]) -> dict[str, list[dict[str, str]]]:
    return {
        file.stem: [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        for file in sorted(written[0].iterdir())
    }


def modules(pairs: list[dict[str, str]]) -> set[str]:
    return {re.match(r"In Python's module `([\w.]+)`", pair["prompt"]).group(1) for pair in pairs}  # type: ignore[union-attr]


def test_there_are_at_least_3000_pairs_in_two_files(files: dict[str, list[dict[str, str]]]) -> None:
    assert list(files) == ["train", "validation"]
    assert len(files["train"]) + len(files["validation"]) >= 3000
    assert len(files["validation"]) >= 100
    assert all(set(pair) == {"prompt", "completion"} for pairs in files.values() for pair in pairs)


def test_no_module_and_no_answer_is_in_both(files: dict[str, list[dict[str, str]]]) -> None:
    packages = {name: {module.partition(".")[0] for module in modules(pairs)} for name, pairs in files.items()}
    assert not packages["train"] & packages["validation"]
    answers = {name: {pair["completion"] for pair in pairs} for name, pairs in files.items()}
    assert not answers["train"] & answers["validation"]


def test_the_same_python_gives_the_same_pairs(
    recipe: SimpleNamespace, files: dict[str, list[dict[str, str]]], tmp_path: Path
) -> None:
    recipe.write(tmp_path / "again")
    again = [json.loads(line) for line in (tmp_path / "again" / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    assert again == files["train"]


def test_a_pair_is_a_question_and_the_summary(recipe: SimpleNamespace) -> None:
    source = '''
class Box:
    """Holds one thing
    at a time.

    More than is asked."""

    def put(self, thing, /, where=None):
        """Put a thing in, and return the box."""

    def _hidden(self):
        """Nobody asks about private names."""

def short(): "Too short."
'''
    assert list(recipe.pairs_of("boxes", source)) == [
        {"prompt": "In Python's module `boxes`, what is the class `Box`?", "completion": "Holds one thing at a time."},
        {
            "prompt": "In Python's module `boxes`, what does the method `Box.put(thing, where)` do?",
            "completion": "Put a thing in, and return the box.",
        },
    ]


def test_nothing_is_imported(recipe: SimpleNamespace, written: tuple[Path, set[str]]) -> None:
    before = set(sys.modules)
    names = [name for name, _ in recipe.modules()]
    assert set(sys.modules) == before
    assert {name for name in written[1] if not name.startswith("_sysconfigdata")} == set()  # where Python is installed
    assert "json.decoder" in names
    assert "json" in names
    assert not {"this", "antigravity", "test", "idlelib.idle", "site-packages"} & set(names)
