"""What the README shows works as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
A_MODEL = ROOT / "tests/planner/configs/llama-3.1-8b"
PLANNING = ("lightning-shard plan", "lightning-shard spec", "lightning-shard devices")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Every line of the console blocks, continued lines joined."""
    text = "".join(blocks("console")).replace("\\\n", " ")
    return [line.partition(" #")[0].strip() for line in text.splitlines() if line.strip()]


def test_there_is_something_to_check() -> None:
    assert len(blocks("python")) >= 2
    assert [command for command in commands() if command.startswith(PLANNING)]


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_python_blocks_compile(number: int) -> None:
    compile(blocks("python")[number], f"README.md, Python block {number + 1}", "exec")


def test_python_blocks_run_in_order(tmp_path: Path) -> None:
    script = tmp_path / "readme.py"
    script.write_text("\n".join(blocks("python")))
    result = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "Plan(" in result.stdout


@pytest.mark.parametrize("command", [command for command in commands() if command.startswith(PLANNING)])
def test_planning_commands_run(command: str, tmp_path: Path) -> None:
    line = re.sub(r"path/to/\S+", str(A_MODEL), command)
    here = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=here, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout or (tmp_path / "spec.json").stat().st_size > 0


def test_the_first_commands_are_targets_of_the_makefile() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    first = [line.split()[:2] for line in blocks("console")[0].splitlines()]
    assert [program for program, _ in first] == ["make", "make"]
    assert [target for _, target in first] == ["quickstart", "test"]
    assert {"quickstart", "test"} <= set(targets)


def test_files_it_points_to_exist() -> None:
    named = re.findall(r"(?:recipes|docs|tests)/[\w./-]+\w", README)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_test_that_contributors_are_shown_passes(tmp_path: Path) -> None:
    shown = re.findall(r"^```python\n(.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "test_shown.py").write_text("\n".join(shown))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert "1 passed" in result.stdout, result.stdout
