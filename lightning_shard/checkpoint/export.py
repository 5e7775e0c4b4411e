"""From a checkpoint to what transformers and peft load without this package, a shard at a time."""

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from lightning_shard.checkpoint.atomic import whole_folder
from lightning_shard.checkpoint.directory import SavedCheckpoint, open_directory, to_bytes
from lightning_shard.checkpoint.errors import CheckpointError
from lightning_shard.checkpoint.manifest import is_checkpoint, locate
from lightning_shard.checkpoint.model_config import CONFIG
from lightning_shard.checkpoint.read import CURRENT_ALIASES, CURRENT_STATE, MODEL
from lightning_shard.checkpoint.single_file import require_whole_file, write_file
from lightning_shard.checkpoint.write import ADAPTER, adapter_beside
from lightning_shard.parallelize.weights import INDEX, WEIGHTS

SHARD_BYTES = 5 * 10**9
ADAPTER_CONFIG = "adapter_config.json"


@dataclass
class ShardWriter:
    """Collects tensors and writes a safetensors file whenever one is full, then the index.

    Args:
        folder: to write in.
        shard_bytes: no file is larger, but for a single tensor that is.
    """

    folder: Path
    shard_bytes: int = SHARD_BYTES
    _held: dict[str, Tensor] = field(default_factory=dict)
    _files: list[list[str]] = field(default_factory=list)
    _total_bytes: int = 0

    def add(self, name: str, value: Tensor) -> None:
        """Take one tensor."""
        size = value.numel() * value.element_size()
        held = sum(t.numel() * t.element_size() for t in self._held.values())
        if self._held and held + size > self.shard_bytes:
            self._flush()
        self._held[name] = value.contiguous()
        self._total_bytes += size

    def finish(self) -> None:
        """Write what is left, and name the files as transformers expects them."""
        self._flush()
        count = len(self._files)
        if count == 1:
            (self.folder / "part-1").rename(self.folder / WEIGHTS)
            return
        weight_map = {}
        for number, names in enumerate(self._files, start=1):
            file = f"model-{number:05d}-of-{count:05d}.safetensors"
            (self.folder / f"part-{number}").rename(self.folder / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self.folder / INDEX).write_text(json.dumps(index, indent=2))

    def _flush(self) -> None:
        if self._held:
            self._files.append(list(self._held))
            save_file(self._held, self.folder / f"part-{len(self._files)}", metadata={"format": "pt"})
            self._held = {}


def open_checkpoint(path: Path) -> SavedCheckpoint:
    """Open a checkpoint folder on one process.

    Raises:
        ValueError: when there is none of this package at ``path``, or it is damaged.
    """
    folder = locate(path)
    if (folder / ADAPTER_CONFIG).is_file():
        raise ValueError(f"{path} is a PEFT folder: peft loads it as it is. Merge it into its base with --to merged.")
    if not is_checkpoint(folder):
        raise ValueError(f"{path} is no checkpoint folder of this package. Give one that a strategy of it has written.")
    try:
        return open_directory(folder, weights_only=None)
    except CheckpointError as error:
        raise ValueError(str(error)) from error


def export_adapter(path: Path, target: Path, dtype: torch.dtype | None = None) -> None:
    """Write the PEFT folder of a checkpoint to ``target``.

    Args:
        path: a checkpoint folder, or a checkpoint that is one file.
        target: appears whole.
        dtype: of the weights; as trained by default.

    Raises:
        ValueError: when the checkpoint has no adapter.
    """
    located = locate(path)
    if located.is_file():
        require_whole_file(located)
        source = adapter_beside(located)
    else:
        source = open_checkpoint(path).folder / ADAPTER
    if not source.is_dir():
        raise ValueError(f"{path} holds no adapter: it was trained in full. Use --to full.")

    with whole_folder(target) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        if dtype is not None:
            weights = folder / "adapter_model.safetensors"
            save_file({name: cast(value, dtype) for name, value in tensors_in([weights])}, weights, {"format": "pt"})


def export_full(path: Path, target: Path, dtype: torch.dtype | None = None, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a model that was trained in full as a Hugging Face folder, or as one file for ``load_from_checkpoint``.

    Args:
        path: a checkpoint folder.
        target: a folder; or a file whose name ends in ``.ckpt``.
        dtype: of the weights; as stored by default.
        shard_bytes: the size of one weights file.

    Raises:
        ValueError: when the checkpoint holds adapters only, or no transformers model.
    """
    saved = open_checkpoint(path)
    if target.suffix == ".ckpt":
        _lightning_file(saved, target, dtype)
        return
    if (saved.folder / ADAPTER).is_dir():
        raise ValueError(
            f"{path} holds what was trained on a frozen base, not a whole model. Use --to merged, or adapter."
        )
    config = saved.folder / CONFIG
    if not config.is_dir():
        raise ValueError(
            f"{path} holds no transformers model that a Hugging Face folder could be made of. Give an --output that ends in "
            ".ckpt: a file for LightningModule.load_from_checkpoint."
        )
    prefix = MODEL + json.loads((config / "place.json").read_text())["prefix"]

    with whole_folder(target) as folder:
        copy_all(config, folder, but={"place.json"})
        writer = ShardWriter(folder, shard_bytes)
        for name in sorted(name for name in saved.tensors.names if name.startswith(prefix)):
            writer.add(name.removeprefix(prefix), cast(saved.tensors.read_whole(name), dtype))
        writer.finish()
        set_dtype(folder / "config.json", dtype)


def _lightning_file(saved: SavedCheckpoint, target: Path, dtype: torch.dtype | None) -> None:
    """The one form that has to be whole in memory."""
    names = sorted(name for name in saved.tensors.names if name.startswith(MODEL))
    state: dict[str, Any] = dict(saved.trainer["state_dict"])
    state.update({name.removeprefix(MODEL): cast(saved.tensors.read_whole(name), dtype) for name in names})
    state.update({alias: state[name] for alias, name in saved.trainer["aliases"].items()})
    dropped = ("optimizer_states", "aliases", "lr_schedulers", "averaging_state", CURRENT_STATE, CURRENT_ALIASES)
    rest = {key: value for key, value in saved.trainer.items() if key not in dropped}
    write_file(to_bytes({**rest, "state_dict": state}), target)


def cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The tensor in ``dtype``, if it is one of numbers with a point."""
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def tensors_in(files: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of safetensors files, one at a time."""
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                yield name, opened.get_tensor(name)


def copy_all(source: Path, folder: Path, but: set[str]) -> None:
    """Copy the files of a folder that are not named in ``but``."""
    for file in source.iterdir():
        if file.is_file() and file.name not in but:
            shutil.copy(file, folder / file.name)


def set_dtype(config: Path, dtype: torch.dtype | None) -> None:
    """Have a model's config say the type its weights have."""
    if dtype is not None:
        content = json.loads(config.read_text())
        content.pop("torch_dtype", None)
        content["dtype"] = str(dtype).removeprefix("torch.")
        config.write_text(json.dumps(content, indent=2))
