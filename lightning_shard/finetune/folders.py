"""Folders that appear whole or not at all."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_shard.checkpoint.atomic import let_others_read


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to write in, renamed to ``target`` at the end; on an error nothing of it stays.

    What stood at ``target`` before is replaced in the same moment.
    """
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    # mkdtemp makes a private folder, and the last name should have the permissions of any other.
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        fresh = scratch / "new"
        fresh.mkdir()
        yield fresh
        let_others_read(fresh)
        if target.exists():
            os.rename(target, scratch / "old")
        os.rename(fresh, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
