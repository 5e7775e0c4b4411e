"""Adapters merged into their base by peft's own layers, one layer at a time, one file of the base after another."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lightning_shard.checkpoint.atomic import whole_folder
from lightning_shard.checkpoint.base import fingerprints
from lightning_shard.checkpoint.directory import SavedCheckpoint
from lightning_shard.checkpoint.export import (
    ADAPTER_CONFIG,
    cast,
    copy_all,
    open_checkpoint,
    set_dtype,
    tensors_in,
)
from lightning_shard.checkpoint.write import ADAPTER, KEY
from lightning_shard.parallelize.weights import INDEX
from lightning_shard.pretrained import model_folder

ADAPTER_WEIGHTS, NAME = "adapter_model.safetensors", "default"


def export_merged(path: Path, target: Path, dtype: torch.dtype | None = None, base: str | None = None) -> None:
    """Write the base with the adapters merged in, as ``PeftModel.merge_and_unload`` would, as a Hugging Face folder.

    At most one file of the base and one layer are in memory.

    Args:
        path: a checkpoint folder with adapters, or a PEFT folder, of whose base nothing but the name is known.
        target: a folder, which appears whole.
        dtype: in which the base is loaded and the result is written; as the base is stored by default.
        base: folder or hub id of the base; the one the checkpoint names by default.

    Raises:
        ValueError: when the checkpoint has no adapter, or the base is not the one it was trained on.
    """
    folder, named, wanted = _adapter(path)
    source = _base_folder(base or named)
    layers = _Layers(source, folder)

    with whole_folder(target) as fresh:
        files = sorted(source.glob("*.safetensors"))
        for file in files:
            merged = {name: _merged(name, value, layers, wanted, dtype, source) for name, value in tensors_in([file])}
            save_file(merged, fresh / file.name, metadata={"format": "pt"})
            del merged  # before the next file is read
        copy_all(source, fresh, but={file.name for file in files})
        set_dtype(fresh / "config.json", dtype)
        layers.require_all_merged()
    if dtype is not None and (target / INDEX).is_file():
        _correct_index(target)


def _merged(
    name: str,
    value: Tensor,
    layers: "_Layers",
    wanted: Mapping[str, Any],
    dtype: torch.dtype | None,
    source: Path,
) -> Tensor:
    if name in wanted:
        ours, saved = fingerprints({name: value}, None)[name], wanted[name]
        exact = ours[1] == saved[1]
        if list(ours[0]) != list(saved[0]) or ours[2 if exact else 3] != saved[2 if exact else 3]:
            raise ValueError(
                f"{name!r} in {source} differs from the base the checkpoint was trained on. Give that one with --base."
            )
    return layers.merge(name, cast(value, dtype))


class _Layers:
    """The adapted layers of a model whose weights are nowhere: each is filled, merged and emptied again."""

    def __init__(self, base: Path, adapter: Path) -> None:
        import transformers
        from peft import PeftConfig, PeftModel

        config: Any = transformers.AutoConfig.from_pretrained(base)
        cls = getattr(transformers, (config.architectures or [""])[0], None) or transformers.AutoModel
        with torch.device("meta"):
            model = cls(config) if cls is not transformers.AutoModel else cls.from_config(config)
            peft_model = PeftModel(model, PeftConfig.from_pretrained(adapter), adapter_name=NAME)
        self._weights = load_file(adapter / ADAPTER_WEIGHTS)
        self._tuned = {
            name: module for name, module in peft_model.base_model.model.named_modules() if hasattr(module, "lora_A")
        }
        tied = getattr(config.get_text_config(), "tie_word_embeddings", False)
        ends = [name for name in self._tuned if name.rsplit(".")[-1] in ("lm_head", "embed_tokens", "wte")]
        if tied and ends:
            raise ValueError(
                f"The adapter changes {ends[0]!r}, whose weight the model shares between its embedding and its head: the two "
                "would no longer be one. Use --to adapter."
            )
        self._left = set(self._weights)

    def merge(self, name: str, value: Tensor) -> Tensor:
        """The base's tensor ``name`` with its adapter merged in, or the copy that was trained in its place."""
        copy = f"base_model.model.{name}"
        if copy in self._weights:
            self._left.discard(copy)
            return self._weights[copy].to(value.dtype)
        layer_name, _, kind = name.rpartition(".")
        layer = self._tuned.get(layer_name)
        if layer is None or kind != "weight":
            return value
        return self._merge_layer(layer_name, layer, value)

    def _merge_layer(self, name: str, layer: Any, value: Tensor) -> Tensor:
        prefix = f"base_model.model.{name}."
        mine = {key.removeprefix(prefix): tensor for key, tensor in self._weights.items() if key.startswith(prefix)}
        self._left -= {prefix + key for key in mine}
        base = layer.get_base_layer()
        base.weight = nn.Parameter(value, requires_grad=False)
        for key, tensor in mine.items():
            _set(layer, key, tensor)
        layer.merge(safe_merge=False, adapter_names=[NAME])
        merged: Tensor = base.weight.detach()
        base.weight = nn.Parameter(torch.empty_like(merged, device="meta"), requires_grad=False)
        return merged

    def require_all_merged(self) -> None:
        """Raise ValueError when the base has no place for a part of the adapter."""
        if self._left:
            raise ValueError(
                f"The base has no tensor for {len(self._left)} of the adapter's, the first is {sorted(self._left)[0]!r}. A "
                "new head is in no base, and some files name their tensors otherwise than the model does: use --to adapter "
                "and peft."
            )


def _set(layer: Any, key: str, tensor: Tensor) -> None:
    """Put an adapter's tensor, named as in a PEFT folder (``lora_A.weight``), into its place (``lora_A.default.weight``)."""
    kind, _, rest = key.partition(".")
    holder = getattr(layer, kind)
    parameter = nn.Parameter(tensor, requires_grad=False)
    if isinstance(holder, nn.ParameterDict):
        holder[NAME] = parameter
    else:
        setattr(holder[NAME], rest or "weight", parameter)


def _adapter(path: Path) -> tuple[Path, str | None, dict[str, Any]]:
    """The PEFT folder, the base it names, and the fingerprints of that base's tensors where they are known."""
    config = path / ADAPTER_CONFIG
    if config.is_file():
        return path, json.loads(config.read_text()).get("base_model_name_or_path"), {}
    saved = open_checkpoint(path)
    folder = saved.folder / ADAPTER
    if not folder.is_dir():
        raise ValueError(f"{path} holds no adapter to merge: it was trained in full. Use --to full.")
    return folder, (saved.trainer[KEY]["base"] or {}).get("path"), _fingerprints_by_name(saved)


def _base_folder(path: str | None) -> Path:
    if not path:
        raise ValueError("The checkpoint does not say where its base lies. Give its folder or hub id with --base.")
    try:
        folder = model_folder(path)
    except ValueError as error:
        raise ValueError(f"The base {path!r} is neither a folder nor on the hub. Give it with --base.") from error
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} holds no safetensors files. Save the base with save_pretrained first.")
    return folder


def _fingerprints_by_name(saved: SavedCheckpoint) -> dict[str, Any]:
    """Fingerprints of the base by the names its own files use."""
    base = saved.trainer[KEY]["base"] or {"tensors": {}}
    result = {}
    for name, value in base["tensors"].items():
        inside = name.partition("base_model.model.")[2]
        result[inside.replace(".base_layer.", ".").replace(".original_module.", ".")] = value
    return result


def _correct_index(folder: Path) -> None:
    """The total size that another type gives."""
    index = json.loads((folder / INDEX).read_text())
    total = sum(value.numel() * value.element_size() for _, value in tensors_in(sorted(folder.glob("*.safetensors"))))
    index.setdefault("metadata", {})["total_size"] = total
    (folder / INDEX).write_text(json.dumps(index, indent=2))
