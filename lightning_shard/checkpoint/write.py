"""One run's saving: folders or files, now or in the background, and what may be removed when."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shard.checkpoint.adapter_folder import adapter_writer
from lightning_shard.checkpoint.atomic import link
from lightning_shard.checkpoint.background import Background, copy_to_host
from lightning_shard.checkpoint.directory import Contents, remove_directory, save_directory, to_bytes
from lightning_shard.checkpoint.errors import CheckpointError
from lightning_shard.checkpoint.manifest import is_checkpoint
from lightning_shard.checkpoint.model_config import config_writer
from lightning_shard.checkpoint.module_state import split_values
from lightning_shard.checkpoint.names import parameter_names
from lightning_shard.checkpoint.optimizer_state import split_tensors
from lightning_shard.checkpoint.options import SaveOptions
from lightning_shard.checkpoint.read import CURRENT, CURRENT_ALIASES, CURRENT_STATE, MODEL
from lightning_shard.checkpoint.remote import RemotePath, is_remote
from lightning_shard.checkpoint.remote_save import put_all, remove_remote, save_remote
from lightning_shard.checkpoint.single_file import write_file
from lightning_shard.parallelize.together import on_all_ranks, rank_in, size_of

log = logging.getLogger(__name__)

KEY = "lightning_shard"
"""Of what this package adds to Lightning's checkpoint."""
ADAPTER = "adapter"
GRACE_S = 30.0
"""How long a failed run waits for the save in the background."""


class Saver:
    """Writes checkpoints of one run.

    Args:
        options: as the user chose.
        files: Lightning's CheckpointIO, which writes and removes single files.
        group: the ranks that write; apart from the group that trains.
    """

    def __init__(self, options: SaveOptions, files: Any, group: dist.ProcessGroup | None) -> None:
        self._options = options
        self._files = files
        self._group = group
        self._failed = False
        """Whether the newest save failed: what is older must stay then."""
        self._background: Background | None = None
        """The save that is being written meanwhile."""

    def save(self, checkpoint: dict[str, Any], path: str, root: nn.Module, storage_options: Any) -> None:
        """Write what Lightning put together. Collective.

        Raises:
            CheckpointError: on all ranks, unless the options say to go on.
        """
        self.wait()
        write = self._file if self._options.checkpoint_format == "file" else self._folder
        job = write(checkpoint, path, root, storage_options)
        if self._options.async_save:
            self._background = Background(job)
        else:
            self._settle(job)

    def wait(self) -> None:
        """Wait for a save in the background. Collective.

        Raises:
            CheckpointError: on all ranks, when it failed on one, unless the options say to go on.
        """
        background, self._background = self._background, None
        if background is not None:
            self._settle(lambda: on_all_ranks(background.result, self._group))

    def abandon(self) -> None:
        """Give a save in the background a moment to end by itself: the run has failed, ranks may be gone."""
        if self._background is not None:
            self._background.join(GRACE_S)
            self._background = None

    def remove(self, path: str) -> None:
        """Remove an older checkpoint once the newest is complete. The first rank does it."""
        if rank_in(self._group) == 0:
            self._after_save(lambda: self._remove(path))

    def link(self, target: Path, name: Path) -> None:
        """Have ``name`` point at ``target`` once that is complete. The first rank does it."""
        if rank_in(self._group) == 0 and target.absolute() != name.absolute():
            self._after_save(lambda: link(target, name))

    def _after_save(self, action: Callable[[], None]) -> None:
        if self._background is not None:
            self._background.then(action)
        elif self._failed:
            log.warning("An older checkpoint stays where it is: the newest could not be written.")
        else:
            action()

    def _remove(self, name: str) -> None:
        if is_remote(name):
            self._remove_remote(RemotePath(name))
            return
        path = Path(name)
        if path.is_dir() and not path.is_symlink():
            remove_directory(path)
        else:
            self._files.remove_checkpoint(path)
            if (beside := adapter_beside(path)).is_dir():
                remove_directory(beside)

    def _remove_remote(self, path: RemotePath) -> None:
        if is_checkpoint(path):
            remove_remote(path)
        else:
            self._files.remove_checkpoint(path.url)
            (path.parent / adapter_beside(Path(path.name)).name).remove()

    def _settle(self, job: Callable[[], None]) -> None:
        self._failed = True
        try:
            job()
        except CheckpointError as error:
            if self._options.on_save_error == "raise":
                raise
            log.warning(str(error))
        else:
            self._failed = False

    def _folder(
        self, checkpoint: dict[str, Any], path: str, root: nn.Module, storage_options: Any
    ) -> Callable[[], None]:
        if storage_options is not None and not is_remote(path):
            raise ValueError(
                f"{path}: storage_options are for remote storage, which a path names by its protocol (s3://)."
            )
        first = rank_in(self._group) == 0
        tensors, aliases, rest = split_values(checkpoint["state_dict"])
        stored = {MODEL + name: value for name, value in tensors.items()}
        trained, trained_aliases, trained_rest = split_values(checkpoint.get(CURRENT_STATE, {}))
        stored.update({CURRENT + name: value for name, value in trained.items()})
        optimizers = []
        for number, state in enumerate(checkpoint.get("optimizer_states", ())):
            if "state" in state and "param_groups" in state and _is_named(state):
                state, of_optimizer = split_tensors(state, f"optimizer/{number}")
                stored.update(of_optimizer)
            optimizers.append(state)
        trainer = {**checkpoint, "state_dict": rest, "aliases": aliases}
        if CURRENT_STATE in checkpoint:
            trainer.update({CURRENT_STATE: trained_rest, CURRENT_ALIASES: trained_aliases})
        if "optimizer_states" in checkpoint:
            trainer["optimizer_states"] = optimizers
        contents = Contents(
            tensors=self._staged(self._mine(stored, set(parameter_names(root).values()))),
            trainer=to_bytes(trainer) if first else b"",
            plan=checkpoint[KEY]["plan"],
        )
        adapters = adapter_writer(root, ADAPTER, self._group, copy=self._options.async_save)
        config = config_writer(root)

        def job() -> None:
            try:
                whole = replace(contents, write_more=together(adapters(), config))
            except Exception as error:
                raise CheckpointError(f"The checkpoint {path} was not written: {error}") from error
            if is_remote(path):
                save_remote(whole, RemotePath(path, storage_options), self._group)
            else:
                save_directory(whole, Path(path), self._group)

        return job

    def _staged(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the host when they are written in the background: training goes on to change the originals."""
        return copy_to_host(tensors) if self._options.async_save else tensors

    def _mine(self, tensors: Mapping[str, Tensor], parameters: set[str]) -> dict[str, Tensor]:
        """Shards, and this rank's share of what all ranks hold alike, the largest first to whoever has least.

        Buffers may differ between ranks: the first rank's count.
        """
        loads = [0] * size_of(self._group)
        me = rank_in(self._group)
        mine: dict[str, Tensor] = {}
        for name, value in sorted(tensors.items(), key=lambda item: (-item[1].numel(), item[0])):
            if isinstance(value, DTensor):
                mine[name] = value
                continue
            kind, _, inner = name.partition("/")
            alike = f"{kind}/" not in (MODEL, CURRENT) or inner in parameters
            owner = loads.index(min(loads)) if alike else 0
            loads[owner] += value.numel() * value.element_size()
            if owner == me:
                mine[name] = value
        return mine

    def _file(self, checkpoint: dict[str, Any], path: str, root: nn.Module, storage_options: Any) -> Callable[[], None]:
        first = rank_in(self._group) == 0
        adapters = adapter_writer(root, adapter_beside(Path(path)).name, self._group, copy=self._options.async_save)
        local = not is_remote(path) and storage_options is None and _writes_plain_files(self._files)
        data = to_bytes(checkpoint) if first and local else b""

        def write(beside: Callable[[Path], None] | None) -> None:
            if first and local:
                write_file(data, Path(path))
                if beside is not None:
                    beside(Path(path).parent)
            elif first:
                self._files.save_checkpoint(checkpoint, path, storage_options=storage_options)
                if beside is not None and is_remote(path):
                    put_all(beside, RemotePath(path, storage_options).parent)

        def job() -> None:
            try:
                beside = adapters()
                on_all_ranks(lambda: write(beside), self._group)
            except Exception as error:
                raise CheckpointError(f"The checkpoint {path} was not written: {error}") from error

        return job


def together(*writers: Callable[[Path], None] | None) -> Callable[[Path], None]:
    """One writer that does what all of them do."""

    def write(folder: Path) -> None:
        for writer in writers:
            if writer is not None:
                writer(folder)

    return write


def adapter_beside(file: Path) -> Path:
    """The PEFT folder that lies beside a checkpoint that is one file."""
    return file.with_name(f"{file.stem}.adapter")


def _is_named(state: Mapping[str, Any]) -> bool:
    return all(isinstance(name, str) for group in state["param_groups"] for name in group["params"])


def _writes_plain_files(files: Any) -> bool:
    return type(files).__name__ == "TorchCheckpointIO"
