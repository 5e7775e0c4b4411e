"""The second door: a ModelSpec from a folder with a ``config.json``, a saved spec or a hub id."""

import json
from pathlib import Path
from typing import Any

from lightning_shard.specs.model import ModelSpec
from lightning_shard.specs.model_json import load_spec

_SIZES = ("hidden_size", "n_embd", "d_model", "dim", "hidden_sizes", "embed_dim")
_COUNTS = (
    "num_attention_heads", "n_head", "num_heads", "num_key_value_heads", "head_dim", "d_kv",
    "intermediate_size", "n_inner", "ffn_dim", "d_ff", "vocab_size",
)  # fmt: skip
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "depths", "encoder_layers")


def read_pretrained(model: str | Path) -> ModelSpec:
    """A ModelSpec without weights: built on the meta device by transformers, or read from a saved spec."""
    path = Path(model)
    if path.suffix == ".json" and path.name != "config.json":
        return load_spec(path)
    if path.name == "config.json":
        path = path.parent
    config = _read_folder(path) if path.is_dir() else None
    if config is None and _looks_like_path(str(model)):
        raise ValueError(f"There is no model at {model}. Give a folder with a config.json, a saved spec or a hub id.")
    if config is None:
        require_on_hub(
            str(model), f"The model {str(model)!r}", "Give a folder with a config.json, a saved spec or a hub id."
        )
    return _build(str(model) if config is None else str(path), name=path.name if config else str(model))


def require_on_hub(name: str, given: str, rule: str) -> None:
    """Raise ValueError unless ``name`` is in the hub's cache, or the hub answers for it.

    Args:
        name: a hub id.
        given: what the user calls it, for the error.
        rule: what to give instead, for the error.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
        HfApi().model_info(name, timeout=10)  # loading would try for a minute before it gives up
    except Exception as error:
        raise ValueError(
            f"{given} is no folder here (looked from {Path.cwd()}), is not in the hub's cache, and the hub does not give "
            f"it: {str(error).strip() or type(error).__name__}. {rule}"
        ) from error


def _looks_like_path(model: str) -> bool:
    """A hub id has at most one slash, and does not start like a path."""
    return model.count("/") > 1 or model.startswith((".", "/", "~")) or model.endswith("/")


def _read_folder(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        raise ValueError(f"{path} has no config.json. Give a Hugging Face model folder; the weights are not needed.")
    try:
        config = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{file} is not readable as JSON: {error}. Copy it again from where the model came."
        ) from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(
            f"{file} names no model_type, so the model's class is not known. Use the model's own config.json."
        )
    _require_sizes(file, config)
    return config


def _require_sizes(file: Path, config: dict[str, Any]) -> None:
    """Raise for a half config: transformers would fill what is missing with some other model's sizes."""
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    for what, names in (("hidden size", _SIZES), ("number of layers", _DEPTHS)):
        if not any(name in part for part in parts for name in names):
            raise ValueError(
                f"{file} is incomplete: it gives no {what} (one of {', '.join(names)}), and a default would describe "
                "another model. Use the model's own config.json."
            )
    bad = {key: value for part in parts for key, value in part.items() if _is_bad(key, value)}
    if bad:
        raise ValueError(
            f"{file} has sizes that are not positive whole numbers: {bad}. Use the model's own config.json."
        )
    for part in parts:
        heads, shared = part.get("num_attention_heads"), part.get("num_key_value_heads")
        if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
            raise ValueError(
                f"{file} has {heads} attention heads over {shared} key-value heads, which must divide them. Use the model's "
                "own config.json."
            )


def _is_bad(name: str, value: object) -> bool:
    """A size that must be given, or one that may be left out, that is no positive whole number."""
    return (name in _SIZES + _DEPTHS or (name in _COUNTS and value is not None)) and _not_positive(value)


def _not_positive(value: object) -> bool:
    return not isinstance(value, list) and (isinstance(value, bool) or not isinstance(value, int) or value < 1)


def _build(source: str, *, name: str) -> ModelSpec:
    """The model's own class on the meta device: shapes and ties without a byte of weights."""
    import torch
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    transformers.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(source)
    except (OSError, ValueError, KeyError, TypeError, ArithmeticError, StrictDataclassError) as error:
        raise ValueError(f"The config of {source!r} cannot be read: {_first_line(error)}") from error
    try:
        with torch.device("meta"):
            module = _model_class(transformers, config)(config)
    except (ValueError, TypeError, RuntimeError, KeyError, AttributeError, ArithmeticError, IndexError) as error:
        raise ValueError(f"No model can be built from the config of {source!r}: {_first_line(error)}") from error
    module.tie_weights()
    return ModelSpec.from_module(module.float(), name=name)


def _model_class(transformers: Any, config: Any) -> Any:
    """The class the config names, else the causal LM of its type, else its bare model."""
    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, name, None)
        if found is not None:
            return found
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise ValueError(f"transformers has no model class for model_type={config.model_type!r}.")


def _first_line(error: BaseException) -> str:
    """What is wrong; a validator's second line says it."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    return " ".join(lines[:2]) if lines and lines[0].endswith(":") else lines[0] if lines else type(error).__name__
