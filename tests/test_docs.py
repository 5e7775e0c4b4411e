"""Every block of the guides works as it stands, and every link leads somewhere."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
GUIDES = sorted(DOCS.glob("*.md"))
A_MODEL = ROOT / "tests/planner/configs/llama-3.1-8b"
PLANNING = ("lightning-shard plan", "lightning-shard devices", "lightning-shard doctor")
COMPILED_ONLY = "from ray"
"""Blocks that need a cluster of their own."""
PREAMBLE = """
import warnings; warnings.filterwarnings("ignore")
from lightning.pytorch.demos.boring_classes import BoringModel
module, data = BoringModel(), BoringModel().train_dataloader()
"""
"""What guides assume that a reader has: a module and data of one's own."""


def blocks(guide: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", guide.read_text(), flags=re.MULTILINE | re.DOTALL)


def commands() -> list[tuple[str, str]]:
    """(guide, line) of every console block, continued lines joined."""
    found = []
    for guide in GUIDES:
        text = "".join(blocks(guide, "console")).replace("\\\n", " ")
        found += [(guide.name, line.partition(" #")[0].strip()) for line in text.splitlines() if line.strip()]
    return found


def test_there_is_something_to_check() -> None:
    assert len(GUIDES) >= 9
    assert sum(len(blocks(guide, "python")) for guide in GUIDES) >= 8
    assert len([line for _, line in commands() if line.startswith(PLANNING)]) >= 4


def with_python() -> list[Path]:
    return [guide for guide in GUIDES if blocks(guide, "python")]


@pytest.mark.parametrize("guide", with_python(), ids=lambda guide: guide.stem)
def test_python_blocks_compile(guide: Path) -> None:
    for number, block in enumerate(blocks(guide, "python"), 1):
        compile(block, f"{guide.name}, block {number}", "exec")


@pytest.mark.slow
@pytest.mark.parametrize("guide", with_python(), ids=lambda guide: guide.stem)
def test_python_blocks_run_in_order(guide: Path, tmp_path: Path) -> None:
    script = tmp_path / "guide.py"
    text = "\n".join(block for block in blocks(guide, "python") if COMPILED_ONLY not in block)
    quick = text.replace("path/to/folder", str(A_MODEL)).replace(
        "**launched(),", '**launched(), accelerator="cpu", max_steps=2,'
    )
    script.write_text(PREAMBLE + quick)
    result = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("guide", "command"), [row for row in commands() if row[1].startswith(PLANNING)])
def test_planning_commands_run(guide: str, command: str, tmp_path: Path) -> None:
    line = re.sub(r"path/to/\S+|meta-llama/\S+", str(A_MODEL), command)
    line = re.sub(r"--(links|calibrate) \S+", "", line)  # files of the reader's own runs
    if line.startswith("lightning-shard plan") and "--device " not in line:
        line += " --device h100-sxm"  # the reader has devices
    here = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=here, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout


def test_links_lead_somewhere() -> None:
    for guide in GUIDES:
        for target in re.findall(r"\]\(([^)#]+)\)", guide.read_text()):
            assert target.startswith("http") or (DOCS / target).is_file(), f"{guide.name}: {target}"


def test_every_guide_is_in_the_contents() -> None:
    listed = re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == [guide.name for guide in GUIDES]


def test_the_reference_names_what_exists() -> None:
    for name in re.findall(r"^::: ([\w.]+)$", (DOCS / "api.md").read_text(), flags=re.MULTILINE):
        module, _, last = name.rpartition(".")
        if importlib.util.find_spec(name if module == "" else module) is None:
            pytest.fail(f"{name}: no module {module}")
        if module and importlib.util.find_spec(module).submodule_search_locations is None:  # type: ignore[union-attr]
            assert hasattr(importlib.import_module(module), last), name


def test_the_picture_of_the_dial_is_drawn_from_the_planner(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "dial.png"
    subprocess.run([sys.executable, str(DOCS / "draw_dial.py"), str(A_MODEL), str(file)], check=True, timeout=300)
    assert file.read_bytes().startswith(b"\x89PNG")


def test_ci_builds_the_reference() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^docs:.*\n\t.*mkdocs build --strict", makefile, flags=re.MULTILINE)
    assert "make docs" in (ROOT / ".ci/run").read_text()
