"""Pretrained models without memory: built on the meta device, their weights read by the strategy, shard by shard."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_shard.parallelize.streaming import note_source, source_of
from lightning_shard.parallelize.weights import INDEX, WEIGHTS, StoredTensor, open_folder

BESIDE_WEIGHTS = ("*.json", "*.model", "*.txt", "*.jinja")
"""Config, tokenizer and chat template of a model on the hub."""

log = logging.getLogger(__name__)


def from_pretrained(
    path: str,
    *,
    auto_class: Any = None,
    dtype: torch.dtype | None = None,
    config: Any = None,
    new: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    """A transformers model on the meta device; the strategy reads its weights straight into their shards.

    Host memory then holds a rank's share, not the model; and no rank reads what it does not keep. Use it in
    ``configure_model`` or ``__init__``, then :func:`lightning_shard.lora` if wanted. A checkpoint whose tensors are
    not those of the model (fused experts, another naming) needs transformers' own ``from_pretrained``.

    Args:
        path: a folder with ``config.json`` and safetensors, or a hub id.
        auto_class: ``transformers.AutoModelForCausalLM`` unless another is given.
        dtype: of the weights; the checkpoint's own by default.
        config: of the model, where it is not the checkpoint's own: one with other labels.
        new: parts of names, such as ``classifier``, of what starts anew where the checkpoint has none or one of another shape.
        options: passed on to ``auto_class.from_config``, such as ``attn_implementation``.

    Returns:
        The model in training mode. What its checkpoint lacks (a new head) is initialised by the model's own rule, seeded by name.

    Raises:
        ValueError: when there is no such model, its weights are not safetensors, or a shape differs.
    """
    import transformers

    folder = model_folder(path)
    config = config or transformers.AutoConfig.from_pretrained(folder)
    config.name_or_path = str(folder) if Path(path).expanduser().is_dir() else path  # adapters name their base by it
    dtype = dtype or getattr(config, "dtype", None) or torch.float32
    with torch.device("meta"):
        model = (auto_class or transformers.AutoModelForCausalLM).from_config(config, dtype=dtype, **options)
    if (folder / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return stream_weights(model, folder, new=new).train()


def stream_weights(module: nn.Module, folder: str | Path, *, new: tuple[str, ...] = ()) -> nn.Module:
    """Note for every meta tensor of ``module`` where in ``folder`` its values lie; the strategy reads them.

    Args:
        module: on the meta device, of any kind; names are those of its state dict.
        folder: with safetensors files, and an index where there are several.
        new: parts of names of what may have another shape there, and then starts anew.

    Returns:
        The same module.

    Raises:
        ValueError: when no name matches, or a shape differs.
    """
    stored = _named_for(module, open_folder(Path(folder)))
    used: set[int] = set()
    missing: list[str] = []
    for name, tensor in module.state_dict(keep_vars=True).items():
        source = _find(stored, name, getattr(module, "base_model_prefix", ""))
        other = source is not None and source.shape != tuple(tensor.shape)
        if source is None or (other and any(part in name for part in new)):
            missing.append(name)
            continue
        if other:
            raise ValueError(
                f"{name!r} is {tuple(tensor.shape)} in {type(module).__name__} and {source.shape} in {folder}. Build the "
                "model from the folder's own config, and resize it after training or load it with transformers."
            )
        used.add(id(source))
        if tensor.is_meta:
            note_source(tensor, source)
    if not used:
        raise ValueError(
            f"No tensor in {folder} has a name of {type(module).__name__}: it has {next(iter(stored))!r} and the like, the "
            f"module {missing[0]!r}. Load it with transformers' from_pretrained."
        )
    _tell(module, folder, missing, sorted(each.name for each in stored.values() if id(each) not in used))
    return module


def model_folder(path: str) -> Path:
    """The local folder of a model: ``path`` itself, or the snapshot of a hub id in the hub's cache.

    What the cache lacks of config, tokenizer and safetensors is fetched first; weights in other forms are left alone.

    Raises:
        ValueError: when there is neither.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder.resolve()
    from huggingface_hub import snapshot_download

    try:
        found = Path(snapshot_download(path, allow_patterns=list(BESIDE_WEIGHTS)))
        index = found / INDEX
        files = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {WEIGHTS}
        return Path(snapshot_download(path, revision=found.name, allow_patterns=[*BESIDE_WEIGHTS, *sorted(files)]))
    except Exception as error:
        raise ValueError(
            f"There is no model at {path!r}: no such folder here, and the hub does not give it ({error}). Give a folder "
            "with a config.json and safetensors, or a hub id such as 'owner/name'."
        ) from error


def unread(module: nn.Module) -> list[str]:
    """Names of saved tensors of a streamed module that no file holds: they would be initialised anew."""
    tensors = module.state_dict(keep_vars=True)
    return [name for name, tensor in tensors.items() if tensor.is_meta and source_of(tensor) is None]


def _named_for(module: nn.Module, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors by the names that transformers gives those of older checkpoints of this model (ViT, BERT).

    What it makes from several tensors, or in another form, keeps the name it has in the file.
    """
    if not hasattr(module, "base_model_prefix"):
        return stored  # no transformers model
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    transforms = get_model_conversion_mapping(module)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    others = [each for each in transforms if not isinstance(each, WeightRenaming)]
    named = {}
    for name, tensor in stored.items():
        new = name
        for renaming in renamings:
            new, _ = renaming.rename_source_key(new)
        converted = any(other.rename_source_key(new)[1] is not None for other in others)
        named[name if converted else new] = tensor
    return named


def _find(stored: dict[str, StoredTensor], name: str, prefix: str) -> StoredTensor | None:
    """By its name, or as a checkpoint of the inner model alone has it, or one of a model around it."""
    for candidate in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"):
        if candidate in stored:
            return stored[candidate]
    return None


def _tell(module: nn.Module, folder: str | Path, missing: list[str], unused: list[str]) -> None:
    new = [name for name in unread(module) if name in missing]  # a tie has a source
    if new:
        log.warning("%s lacks %s: initialised anew, so train it.", folder, _some(new))
    if unused:
        log.warning("%s also holds %s, which %s does not use.", folder, _some(unused), type(module).__name__)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
