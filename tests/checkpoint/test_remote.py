"""Checkpoint folders on remote storage: a local folder under a protocol of its own stands in for it, in every process."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from helpers.regression import Regression, make_vectors
from helpers.resuming import losses_of
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from test_folder_is_whole import contents, damage, files_of

from lightning_shard import FSDP2Strategy, TunedDDPStrategy
from lightning_shard.checkpoint.directory import open_directory
from lightning_shard.checkpoint.errors import CheckpointError
from lightning_shard.checkpoint.manifest import MANIFEST, is_checkpoint, newest_whole
from lightning_shard.checkpoint.remote import RemotePath
from lightning_shard.checkpoint.remote_save import remove_remote, save_remote
from lightning_shard.cli import main
from lightning_shard.testing import run_ranks
from lightning_shard.testing.parity import QUIET


class Killed(BaseException):
    """Nothing is cleaned up after it, as after ``kill -9``."""


class Apart(LocalFileSystem):
    """Known to nobody as local: every path has a protocol, and no file is renamed over another."""

    protocol = "apart"
    changes_left: int | None = None
    """After so many changes the process is killed."""

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("apart://"))

    def _change(self) -> None:
        if Apart.changes_left is not None:
            Apart.changes_left -= 1
            if Apart.changes_left < 0:
                raise Killed

    def pipe_file(self, *args: Any, **kwargs: Any) -> None:
        self._change()
        super().pipe_file(*args, **kwargs)

    def put_file(self, *args: Any, **kwargs: Any) -> None:
        self._change()
        super().put_file(*args, **kwargs)

    def mv(self, *args: Any, **kwargs: Any) -> None:
        self._change()
        super().mv(*args, **kwargs)

    def rm(self, *args: Any, **kwargs: Any) -> None:
        self._change()
        super().rm(*args, **kwargs)


fsspec.register_implementation("apart", Apart, clobber=True)


def url(path: Path) -> str:
    return f"apart://{path}"


def value_at(path: RemotePath) -> float:
    return float(open_directory(path, weights_only=None).tensors.read_whole("model/w")[0, 0])


def test_what_was_written_is_read_and_torch_alone_reads_it_too(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    target = RemotePath(url(tmp_path / "a.ckpt"))
    save_remote(contents(3.0), target)
    opened = open_directory(target, weights_only=None)
    assert opened.trainer == {"epoch": 2}
    for name, value in contents(3.0).tensors.items():
        assert torch.equal(opened.tensors.read_whole(name), value)
    (part,) = tmp_path.glob("a.ckpt/part-*")
    state = {"model/w": torch.zeros(64, 4)}
    dcp.load(state, checkpoint_id=part / "state", no_dist=True)
    assert torch.equal(state["model/w"], torch.full((64, 4), 3.0))
    copied = open_directory(tmp_path / "a.ckpt", weights_only=None)  # copied to a local disk as it is
    assert torch.equal(copied.tensors.read_whole("model/w"), torch.full((64, 4), 3.0))


def test_whoever_is_killed_at_any_change_one_whole_checkpoint_is_there(tmp_path: Path) -> None:
    target = RemotePath(url(tmp_path / "last.ckpt"))
    save_remote(contents(1.0), target)
    seen = []
    for changes in range(100):
        Apart.changes_left = changes
        try:
            save_remote(contents(2.0), target)
            finished = True
        except Killed:
            finished = False
        finally:
            Apart.changes_left = None
        seen.append(value_at(target))
        if finished:
            break
    assert finished
    assert changes > 5
    assert set(seen) == {1.0, 2.0}
    assert seen == sorted(seen)
    assert len(list(tmp_path.glob("last.ckpt/part-*"))) == 1  # what the killed ones left is gone


def test_removal_is_from_sight_first(tmp_path: Path) -> None:
    target = RemotePath(url(tmp_path / "a.ckpt"))
    save_remote(contents(), target)
    Apart.changes_left = 1
    try:
        with pytest.raises(Killed):
            remove_remote(target)
    finally:
        Apart.changes_left = None
    assert (tmp_path / "a.ckpt").exists()
    assert not is_checkpoint(target)
    remove_remote(target)
    assert not (tmp_path / "a.ckpt").exists()


def test_every_damaged_file_is_named_and_the_newest_good_checkpoint_offered(tmp_path: Path) -> None:
    for number, name in enumerate(("old", "newer", "bad")):
        save_remote(contents(float(number)), RemotePath(url(tmp_path / f"{name}.ckpt")))
    bad = RemotePath(url(tmp_path / "bad.ckpt"))
    for file in files_of(tmp_path / "bad.ckpt"):
        for harm in ("truncate", "flip", "remove"):
            before = file.read_bytes()
            damage(file, harm)
            with pytest.raises(CheckpointError) as caught:
                open_directory(bad, weights_only=None)
            file.write_bytes(before)
            assert file.name in str(caught.value)
            assert f"ckpt_path={url(tmp_path / 'newer.ckpt')!r}" in str(caught.value)
    assert str(newest_whole(RemotePath(url(tmp_path)))) == str(bad)


def test_a_part_outside_of_the_folder_is_refused(tmp_path: Path) -> None:
    from lightning_shard.checkpoint.manifest import _own_sum

    save_remote(contents(), RemotePath(url(tmp_path / "a.ckpt")))
    file = tmp_path / "a.ckpt" / MANIFEST
    changed = {**json.loads(file.read_text()), "root": "../other"}
    changed.pop("sha256")
    file.write_text(json.dumps({**changed, "sha256": _own_sum(changed)}))
    with pytest.raises(CheckpointError, match="outside of its own folder"):
        open_directory(RemotePath(url(tmp_path / "a.ckpt")), weights_only=None)


def remote_losses_of(**options: Any) -> tuple[list[float], list[float]]:
    """A body of this module, so that every rank knows the protocol."""
    return losses_of(**options)


@pytest.mark.parametrize("async_save", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["async", "sync"])
def test_ranks_save_to_and_resume_from_remote_storage_under_another_layout(async_save: bool, tmp_path: Path) -> None:
    run = partial(run_ranks, 2, remote_losses_of, kind="lora", folder=url(tmp_path / "run"), steps=10)
    whole, _ = run(make_strategy=partial(FSDP2Strategy, async_save=async_save))[0]
    found = {path.name for path in (tmp_path / "run").iterdir()}
    assert found == {"step=5.ckpt", "step=10.ckpt"}
    (adapter,) = (tmp_path / "run" / "step=5.ckpt").glob("part-*/adapter/adapter_config.json")
    assert json.loads(adapter.read_text())["r"] == 4
    rest, _ = run(make_strategy=TunedDDPStrategy, ckpt=f"{url(tmp_path / 'run')}/step=5.ckpt")[0]
    torch.testing.assert_close(torch.tensor(rest), torch.tensor(whole[5:]), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("form", ["directory", "file"])
def test_older_ones_are_removed_and_the_last_goes_on(form: Any, tmp_path: Path) -> None:
    def trainer(epochs: int, *callbacks: Any) -> Trainer:
        strategy = TunedDDPStrategy(checkpoint_format=form)
        options = {**QUIET, "enable_checkpointing": bool(callbacks), "max_epochs": epochs, "devices": 1}
        return Trainer(**options, strategy=strategy, callbacks=list(callbacks))

    saver = ModelCheckpoint(url(tmp_path / "run"), "{step}", every_n_train_steps=3, save_top_k=1, save_last=True)
    trainer(3, saver).fit(Regression(), make_vectors(0, 1))
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"step=12.ckpt", "last.ckpt"}
    again = trainer(4)
    again.fit(Regression(), make_vectors(0, 1), ckpt_path=f"{url(tmp_path / 'run')}/last.ckpt")
    assert again.global_step == 16


def test_export_from_remote_storage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(**QUIET, strategy=TunedDDPStrategy(), devices=1, max_steps=2)
    module = Regression()
    trainer.fit(module, make_vectors(0, 1))
    trainer.save_checkpoint(f"{url(tmp_path)}/x.ckpt")
    source = ["export", f"{url(tmp_path)}/x.ckpt", "--to", "full"]
    assert main([*source, "--output", str(tmp_path / "whole.ckpt")]) == 0
    loaded = Regression.load_from_checkpoint(tmp_path / "whole.ckpt", weights_only=True)
    for name, value in module.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    assert main(source) == 2
    assert "--output" in capsys.readouterr().err
    assert main(["export", f"{url(tmp_path)}/none.ckpt", "--to", "full", "--output", str(tmp_path / "o")]) == 2
