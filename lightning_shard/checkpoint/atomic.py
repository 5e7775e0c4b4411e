"""A path that is exchanged for a new one in a single moment: whoever is killed, one of the two is there, whole."""

import ctypes
import errno
import hashlib
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def partial_path(target: Path) -> Path:
    """Where to write what shall become ``target``: beside it, hidden, and marked with who writes."""
    # Without the name itself: Lightning finds checkpoints by what their names contain.
    return target.with_name(f".{_digest(target.name)}.{_host()}.{os.getpid()}.partial")


def remove_abandoned(folder: Path) -> None:
    """Remove what killed processes of this machine left unfinished in ``folder``."""
    for path in folder.glob(".*.partial"):
        *_, host, pid, _ = path.name.split(".")
        if host == _host() and pid.isdigit() and not _alive(int(pid)):
            remove(path)


def commit(fresh: Path, target: Path) -> None:
    """Put ``fresh``, a finished file or folder, in the place of ``target``, and remove what was there.

    Everything below ``fresh`` must be on the disk already.
    """
    if fresh.is_dir():
        for folder in [fresh, *(path for path in fresh.rglob("*") if path.is_dir())]:
            sync_folder(folder)
    if not os.path.lexists(target):
        os.rename(fresh, target)
    elif fresh.is_file() and not (target.is_dir() and not target.is_symlink()):
        os.replace(fresh, target)
    elif _exchange(fresh, target):
        sync_folder(target.parent)
        remove(fresh)
    else:
        old = _aside(target)
        remove(old)
        os.rename(target, old)  # where files cannot be exchanged there is a moment with neither: see find_interrupted
        os.rename(fresh, target)
        remove(old)
    sync_folder(target.parent)


def find_interrupted(target: Path) -> Path:
    """``target``, or what :func:`commit` had moved aside when it was killed between its two renames."""
    old = _aside(target)
    return old if not os.path.lexists(target) and old.exists() else target


def link(target: Path, name: Path) -> None:
    """Have ``name`` point at ``target`` (a relative link), in one moment."""
    fresh = partial_path(name)
    remove(fresh)
    os.symlink(os.path.relpath(target, name.parent), fresh)
    if name.is_dir() and not name.is_symlink():
        remove(name)
    os.replace(fresh, name)
    sync_folder(name.parent)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder to write in, which takes the place of ``target`` at the end; on an error nothing of it stays."""
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = partial_path(target)
    remove(fresh)
    fresh.mkdir()
    try:
        yield fresh
        let_others_read(fresh)
        commit(fresh, target)
    finally:
        remove(fresh)


def let_others_read(folder: Path) -> None:
    """Give the files below ``folder`` its own permissions to read and write: safetensors 0.8 writes for the owner alone."""
    mode = folder.stat().st_mode & 0o666
    for file in folder.rglob("*.safetensors"):
        if file.stat().st_mode & 0o666 != mode:
            file.chmod(mode)


def sync_folder(folder: Path) -> None:
    """Have a folder's own entries on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _aside(target: Path) -> Path:
    return target.with_name(f".{_digest(target.name)}.old")


def _digest(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


def _host() -> str:
    return socket.gethostname().replace(".", "-")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


@cache
def _renameat2() -> Callable[..., int] | None:
    try:
        call: Callable[..., int] = ctypes.CDLL(None, use_errno=True).renameat2
        return call
    except (AttributeError, OSError):  # not Linux, or an old C library
        return None


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two paths in one moment; False where the system cannot."""
    call = _renameat2()
    if call is None:
        return False
    if call(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))
