"""Models by folder or hub id."""

from pathlib import Path
from typing import Any

import torch

from lightning_shard.parallelize.materialize import start_anew
from lightning_shard.specs.from_pretrained import require_on_hub

RULE = "Give a folder with a config.json, a tokenizer and safetensors weights, or a hub id such as 'owner/name'."


def local(path: str) -> str:
    """A local folder's whole path, since an adapter's config names it; anything else as it is."""
    folder = Path(path).expanduser()
    return str(folder.resolve()) if folder.is_dir() else path


def pretrained(auto_class: Any, path: str, *, name: str = "model.path", **options: Any) -> Any:
    """``auto_class.from_pretrained``, with a local folder's whole path.

    Raises:
        ValueError: when there is no such model, or a file of it is missing or broken.
    """
    try:
        return auto_class.from_pretrained(local(path), **options)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers, tokenizers and safetensors each raise kinds of their own
        raise ValueError(f"{name}={path!r} cannot be loaded: {_said(error)}\n{RULE}") from error


def pretrained_model(auto_class: Any, path: str, *, new: tuple[str, ...] = (), **options: Any) -> Any:
    """A model with all of its weights.

    Args:
        auto_class: with ``from_pretrained``.
        path: folder or hub id.
        new: parts of names that may be missing or of another shape, as a head that is trained from the start; it starts
            from the run's seed and its name.
        options: of ``from_pretrained``.

    Raises:
        ValueError: when it cannot be loaded, or some weight is not in its files: it would be left at random.
    """
    model, told = pretrained(auto_class, path, output_loading_info=True, **options)
    anew = {*told["missing_keys"], *(key for key, *_ in told["mismatched_keys"])}
    missing = sorted(key for key in anew if not any(part in key for part in new))
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"model.path={path!r} lacks weights of its {type(model).__name__}: {', '.join(missing[:3])}{more}. They would "
            "start at random. Complete the download, or give the model whose config.json this is."
        )
    start_anew(model, [name for name in model.state_dict() if name in anew], torch.initial_seed())
    return model


def _said(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def require_model(path: str) -> None:
    """Raise ValueError unless ``path`` is a model's folder or a hub id that is cached or answers."""
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return
    if folder.exists():
        raise ValueError(f"model.path={path!r} holds no config.json. {RULE}")
    if path.count("/") > 1 or path.startswith((".", "~", "/")):
        raise ValueError(f"model.path={path!r} does not exist (looked from {Path.cwd()}). {RULE}")
    require_on_hub(path, f"model.path={path!r}", RULE)
