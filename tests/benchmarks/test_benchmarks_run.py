"""Every benchmark runs at its smallest size and its tables can be made, so that none rots."""

import shutil
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.options import NAMES
from benchmarks.report import README, write_tables
from benchmarks.results import read

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", NAMES)
def test_runs_and_makes_its_tables(name: str, tmp_path: Path) -> None:
    assert main(["run", name, "--smallest", "--results", str(tmp_path)]) == 0
    rows = read(name, str(tmp_path))
    assert rows
    for row in rows:
        assert {"case", "date", "command", "versions", "hardware"} <= row.keys()
    readme = tmp_path / "README.md"
    shutil.copy(README, readme)
    write_tables(str(tmp_path), readme)
    assert rows[0]["date"] in readme.read_text()
