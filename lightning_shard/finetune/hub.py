"""Models by folder or hub id."""

from pathlib import Path
from typing import Any

RULE = "Give a folder with a config.json, a tokenizer and safetensors weights, or a hub id such as 'owner/name'."


def pretrained(auto_class: Any, path: str, **options: Any) -> Any:
    """``auto_class.from_pretrained``, with a local folder's whole path: an adapter's config names it.

    Raises:
        ValueError: when there is no such model, or a file of it is missing.
    """
    folder = Path(path).expanduser()
    source = str(folder.resolve()) if folder.is_dir() else path
    try:
        return auto_class.from_pretrained(source, **options)
    except OSError as error:
        raise ValueError(f"model.path={path!r} cannot be loaded: {error}\n{RULE}") from error


def require_model(path: str) -> None:
    """Raise ValueError unless ``path`` is a model's folder or a hub id that is cached or answers."""
    folder = Path(path).expanduser()
    if (folder / "config.json").is_file():
        return
    if folder.exists():
        raise ValueError(f"model.path={path!r} holds no config.json. {RULE}")
    if path.count("/") > 1 or path.startswith((".", "~", "/")):
        raise ValueError(f"model.path={path!r} does not exist (looked from {Path.cwd()}). {RULE}")
    _require_hub_model(path)


def _require_hub_model(name: str) -> None:
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        HfApi().model_info(name, timeout=10)  # loading would try for a minute before it gives up
    except Exception as error:
        raise ValueError(
            f"model.path={name!r} is no folder here (looked from {Path.cwd()}), is not in the hub's cache, and the hub "
            f"does not give it: {str(error).strip() or type(error).__name__}. {RULE}"
        ) from error
