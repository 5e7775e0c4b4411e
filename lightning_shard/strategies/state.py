"""Checkpoints that do not know by which layout they were written."""

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard._compat.groups import new_group
from lightning_shard._compat.sharded import averaged_copy
from lightning_shard.checkpoint.base import describe_base, require_same_base
from lightning_shard.checkpoint.directory import SavedCheckpoint, open_directory, unpickling_remedy
from lightning_shard.checkpoint.manifest import is_checkpoint, locate
from lightning_shard.checkpoint.module_state import load_state, named_values
from lightning_shard.checkpoint.names import all_frozen_names, frozen_base_names
from lightning_shard.checkpoint.optimizer_state import join_tensors, load_named_state, named_state
from lightning_shard.checkpoint.options import SaveOptions
from lightning_shard.checkpoint.read import read_module_values, read_trained_values
from lightning_shard.checkpoint.remote import AnyPath, RemotePath, is_remote
from lightning_shard.checkpoint.single_file import gather_optimizer_state, gather_values, require_whole_file
from lightning_shard.checkpoint.write import KEY, Saver
from lightning_shard.parallelize.together import on_all_ranks
from lightning_shard.strategies.laid_out import LaidOutStrategy
from lightning_shard.strategies.progress import ProgressStrategy
from lightning_shard.strategies.stops import StoppableStrategy


class PortableStateStrategy(ProgressStrategy, StoppableStrategy, LaidOutStrategy):
    """Saves state keyed by parameter name, and loads it, or Lightning's own, into the layout in force."""

    _weights_only: bool | None = None
    _save_options = SaveOptions()
    _opened: SavedCheckpoint | None = None
    """The folder that is being resumed from."""
    _base: tuple[frozenset[str], dict[str, Any]] | None = None
    """What identifies the frozen parameters that are not saved; worked out once."""
    _group: dist.ProcessGroup | None = None
    """Of the writers: apart from training, and on the host."""
    _saver: Saver | None = None

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        # Lightning reads this before setup, when an auto strategy does not know its plan: always the same answer.
        return True

    # --- saving ------------------------------------------------------------------------------------------

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._rest()
        values = named_values(self._root, self._left_out())
        return values if self._writes_folders else gather_values(values, keep=self.is_global_zero)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if hasattr(optimizer, "consolidate_state_dict"):
            return super().optimizer_state(optimizer)
        self._rest()
        state = named_state(self._root, _plain(optimizer))
        return state if self._writes_folders else gather_optimizer_state(state, keep=self.is_global_zero)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        path = str(self.broadcast(str(filepath)))
        self.wait_for_save()
        checkpoint[KEY] = {
            "world_size": self.world_size,
            "plan": self.plan.to_dict(),
            "base": self._describe_base(),
            "ranks": self.progress_of_ranks() if "optimizer_states" in checkpoint else None,
        }
        self._savers().save(checkpoint, path, self._root, storage_options)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        self._savers().remove(str(filepath))

    def link_checkpoint(self, trainer: Any, filepath: str, linkpath: str) -> None:
        """What ModelCheckpoint calls for ``save_last="link"``: in one moment, and only once the target is complete."""
        self._savers().link(Path(filepath), Path(linkpath))
        self.barrier()

    @override
    def wait_for_save(self) -> None:
        """Wait for a save in the background (``async_save=True``). Collective.

        Raises:
            CheckpointError: on all ranks, when it could not be written.
        """
        if self._saver is not None:
            self._saver.wait()

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.wait_for_save()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._saver is not None:
            self._saver.abandon()

    @property
    def _writes_folders(self) -> bool:
        return self._save_options.checkpoint_format == "directory"

    def _savers(self) -> Saver:
        if self._saver is None:
            self._saver = Saver(self._save_options, self.checkpoint_io, self._writers())
        return self._saver

    def _writers(self) -> dist.ProcessGroup | None:
        if self._group is None and dist.is_initialized() and self.world_size > 1:
            self._group = new_group("gloo")
        return self._group

    def forget_groups(self) -> None:
        """The process groups of before are gone: make the writers' anew when they are next needed."""
        if self._saver is not None:
            self._saver.abandon()
        self._group = self._saver = None

    def _left_out(self) -> set[str]:
        wanted = self._save_options.save_frozen
        if any(averaged_copy(callback) is not None for callback in vars(self._root.trainer)["callbacks"]):
            return set()  # Lightning's averaging callbacks load what trains strictly, the frozen base included
        if wanted is None:
            return frozen_base_names(self._root)
        return set() if wanted else all_frozen_names(self._root)

    def _describe_base(self) -> dict[str, Any] | None:
        names = frozenset(self._left_out())
        if not names:
            return None
        if self._base is None or self._base[0] != names:
            self._base = names, describe_base(self._root, names, self._writers())
        return self._base[1]

    # --- loading -----------------------------------------------------------------------------------------

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        torch.cuda.empty_cache()
        wanted = self._weights_only if weights_only is None else weights_only
        path = str(self.broadcast(str(checkpoint_path)))
        self.wait_for_save()
        try:
            checkpoint = self._load(path, wanted)
        except UnpicklingError as error:
            raise UnpicklingError(unpickling_remedy(path, type(self).__name__, error)) from error
        self.resume_from((checkpoint.get(KEY) or {}).get("ranks"))
        return checkpoint

    def _load(self, path: str, weights_only: bool | None) -> dict[str, Any]:
        folder: AnyPath = RemotePath(path) if is_remote(path) else locate(Path(path))
        self._opened = None
        if is_checkpoint(folder) or (isinstance(folder, Path) and folder.is_dir()):
            self._rest()
            opened = self._opened = open_directory(folder, weights_only=weights_only, group=self._writers())
            values = on_all_ranks(lambda: read_module_values(opened, self._root), self._writers())
            trained = on_all_ranks(lambda: read_trained_values(opened, self._root), self._writers())
            return {**opened.trainer, **trained, "state_dict": values}
        if isinstance(folder, Path):
            require_whole_file(folder, self._writers())
        return on_all_ranks(
            lambda: self.checkpoint_io.load_checkpoint(path, weights_only=weights_only), self._writers()
        )

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._rest()
        base = (checkpoint.get(KEY) or {}).get("base")
        if base is not None:
            require_same_base(self._root, base, self._writers())
        absent = base["tensors"] if base is not None else ()
        load_state(self._root, checkpoint["state_dict"], absent=absent, strict=strict)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._rest()
        host = getattr(self.precision_plugin, "host_update", None)
        for number, (optimizer, state) in enumerate(zip(self.optimizers, checkpoint["optimizer_states"], strict=False)):
            if self._opened is not None and "tensors" in state:
                state = join_tensors(state, f"optimizer/{number}", self._opened.tensors, self._root, to_host=bool(host))
            load_named_state(self._root, _plain(optimizer), state, host)
        self._opened = None


def _plain(optimizer: Any) -> Optimizer:
    """The torch optimizer behind Lightning's wrapper."""
    inner = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(inner, Optimizer)
    return inner
