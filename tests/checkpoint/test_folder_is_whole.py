"""A checkpoint is complete or invisible; what was altered is named, and a good one is offered. One process, no Trainer."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_shard.checkpoint import atomic, directory
from lightning_shard.checkpoint.directory import Contents, open_directory, remove_directory, save_directory, to_bytes
from lightning_shard.checkpoint.errors import CheckpointError
from lightning_shard.checkpoint.manifest import MANIFEST, locate

GOLDEN = Path(__file__).parent / "golden"


def contents(value: float = 1.0, trainer: dict[str, Any] | None = None) -> Contents:
    tensors = {
        "model/w": torch.full((64, 4), value),
        "model/b": torch.arange(3.0),
        "optimizer/0/w/step": torch.tensor(5.0),
    }
    return Contents(tensors=tensors, trainer=to_bytes(trainer or {"epoch": 2}), plan={"dp_replicate": 1})


def read(path: Path) -> dict[str, Tensor]:
    opened = open_directory(path, weights_only=None)
    return {name: opened.tensors.read_whole(name) for name in opened.tensors.names}


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def test_what_was_written_is_read_and_nothing_else_lies_there(tmp_path: Path) -> None:
    save_directory(contents(), tmp_path / "a.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["a.ckpt"]
    assert open_directory(tmp_path / "a.ckpt", weights_only=None).trainer == {"epoch": 2}
    for name, value in contents().tensors.items():
        assert torch.equal(read(tmp_path / "a.ckpt")[name], value)


def test_torch_alone_reads_the_tensors(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    save_directory(contents(), tmp_path / "a.ckpt")
    state = {"model/w": torch.zeros(64, 4)}
    dcp.load(state, checkpoint_id=tmp_path / "a.ckpt" / "state", no_dist=True)
    assert torch.equal(state["model/w"], torch.ones(64, 4))


@pytest.mark.parametrize("harm", ["truncate", "flip", "remove"])
def test_every_damaged_file_is_named_and_the_newest_good_checkpoint_offered(harm: str, tmp_path: Path) -> None:
    for number, name in enumerate(("old", "newer", "bad")):
        save_directory(contents(float(number)), tmp_path / f"{name}.ckpt")
        os.utime(tmp_path / f"{name}.ckpt" / MANIFEST, ns=(number, number))
    whole = tmp_path / "whole"
    shutil.copytree(tmp_path / "bad.ckpt", whole / "x")
    for file in files_of(tmp_path / "bad.ckpt"):
        damage(file, harm)
        with pytest.raises(CheckpointError) as caught:
            open_directory(tmp_path / "bad.ckpt", weights_only=None)
        assert file.name in str(caught.value)
        assert f"ckpt_path={str(tmp_path / 'newer.ckpt')!r}" in str(caught.value)
        shutil.rmtree(tmp_path / "bad.ckpt")
        shutil.copytree(whole / "x", tmp_path / "bad.ckpt")


def damage(file: Path, harm: str) -> None:
    data = bytearray(file.read_bytes())
    if harm == "remove":
        file.unlink()
    elif harm == "truncate":
        file.write_bytes(data[:-1])
    else:
        data[len(data) // 2] ^= 1
        file.write_bytes(data)


def test_an_older_checkpoint_is_exchanged_in_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "last.ckpt"
    save_directory(contents(1.0), target)
    seen = []
    exchange = atomic._exchange

    def watched(one: Path, other: Path) -> bool:
        seen.append(float(read(target)["model/w"][0, 0]))
        done = exchange(one, other)
        seen.append(float(read(target)["model/w"][0, 0]))
        return done

    monkeypatch.setattr(atomic, "_exchange", watched)
    save_directory(contents(2.0), target)
    assert seen == [1.0, 2.0]


def test_a_kill_between_two_renames_leaves_the_older_one_to_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "last.ckpt"
    save_directory(contents(1.0), target)
    monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)  # a file system that cannot
    rename = os.rename

    def killed(one: Any, other: Any) -> None:
        if Path(other) == target:
            raise KeyboardInterrupt
        rename(one, other)

    monkeypatch.setattr(os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        save_directory(contents(2.0), target)
    monkeypatch.undo()
    assert not target.exists()
    assert float(read(locate(target))["model/w"][0, 0]) == 1.0


def test_what_dead_processes_left_is_removed_and_what_living_ones_write_is_not(tmp_path: Path) -> None:
    dead, living = (atomic.partial_path(tmp_path / name) for name in ("a", "b"))
    dead = dead.with_name(dead.name.replace(str(os.getpid()), str(2**22 - 1)))
    for path in (dead, living):
        path.mkdir()
    save_directory(contents(), tmp_path / "c.ckpt")
    assert not dead.exists()
    assert living.exists()


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_directory(contents(), tmp_path / "good.ckpt")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(directory, "write_synced", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.*good\.ckpt"):
        save_directory(contents(), tmp_path / "next.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["good.ckpt"]


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "a/../../b", "..\\b", ""])
def test_a_file_outside_of_the_folder_is_refused(name: str, tmp_path: Path) -> None:
    save_directory(contents(), tmp_path / "a.ckpt")
    index = tmp_path / "a.ckpt" / "state" / "index.json"
    changed = json.loads(index.read_text())
    changed["tensors"]["model/w"]["chunks"][0]["file"] = name
    index.write_text(json.dumps(changed))
    with pytest.raises(CheckpointError, match="outside of its own folder"):
        directory.StoredTensors(tmp_path / "a.ckpt" / "state")


def test_opening_unpickles_only_tensors_and_plain_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pickle

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("unpickled")

    save_directory(contents(), tmp_path / "a.ckpt")
    save_directory(contents(trainer={"path": Path("x")}), tmp_path / "b.ckpt")
    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    read(tmp_path / "a.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        open_directory(tmp_path / "b.ckpt", weights_only=None)


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_shard.checkpoint import manifest

    monkeypatch.setattr(manifest, "VERSION", 2)
    save_directory(contents(), tmp_path / "a.ckpt")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="Upgrade"):
        open_directory(tmp_path / "a.ckpt", weights_only=None)


def test_removal_is_from_sight_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_directory(contents(), tmp_path / "a.ckpt")

    def interrupted(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        remove_directory(tmp_path / "a.ckpt")
    assert not (tmp_path / "a.ckpt").exists()


def test_links_are_set_in_one_moment(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_directory(contents(), tmp_path / name)
        atomic.link(tmp_path / name, tmp_path / "last.ckpt")
        assert locate(tmp_path / "last.ckpt") == tmp_path / name


@pytest.mark.parametrize("version", [1])
def test_every_older_format_is_still_read(version: int) -> None:
    values = read(GOLDEN / f"version-{version}.ckpt")
    for name, value in contents(7.0).tensors.items():
        assert torch.equal(values[name], value)
    assert open_directory(GOLDEN / f"version-{version}.ckpt", weights_only=None).trainer == {"epoch": 2}
