"""From a path, a factory or a live module to one whose tensors are all without memory."""

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shard.simulate.patches import patched
from lightning_shard.specs import AdapterSpec, TrainSpec

log = logging.getLogger(__name__)

ModelSource = str | Path | Callable[[], nn.Module]


def build_on_meta(source: ModelSource, train: TrainSpec, *, dtype: str | None = None) -> nn.Module:
    """The module on the meta device.

    Args:
        source: a model's folder, a hub id, or a function that builds any module.
        train: says which attention.
        dtype: storage type of a model that is given by its path (FP32 by default).
    """
    with torch.device("meta"), no_weights():
        return source() if callable(source) else _from_config(source, train, dtype)


def add_adapter(module: nn.Module, adapter: AdapterSpec) -> nn.Module:
    """The module in peft's wrapper, as a training run makes it."""
    from lightning_shard.adapters import lora

    targets = adapter.target_modules
    wrapped: nn.Module = lora(
        module,
        r=adapter.r,
        method=adapter.method,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        modules_to_save=list(adapter.modules_to_save) or None,
    )
    return wrapped


NOTHING_AMISS: dict[str, tuple[Any, ...]] = {
    "missing_keys": (), "unexpected_keys": (), "mismatched_keys": (), "error_msgs": (),
}  # fmt: skip
"""What transformers tells of loading a checkpoint that has all the weights."""


@contextmanager
def no_weights() -> Iterator[None]:
    """Inside, transformers' ``from_pretrained`` builds from the config alone."""
    from transformers import PreTrainedModel

    def from_pretrained(
        cls: Any,
        /,
        path: Any,
        *args: Any,
        config: Any = None,
        dtype: Any = None,
        output_loading_info: bool = False,
        **_: Any,
    ) -> Any:
        config = config or cls.config_class.from_pretrained(path)
        model = cls(config)
        model = model.to(dtype) if isinstance(dtype, torch.dtype) else model
        return (model, dict(NOTHING_AMISS)) if output_loading_info else model

    with patched(PreTrainedModel, "from_pretrained", classmethod(from_pretrained)):
        yield


def _from_config(source: str | Path, train: TrainSpec, dtype: str | None) -> nn.Module:
    config = _read_config(Path(source) if Path(source).exists() else source)
    kind = _model_class(config)
    config._attn_implementation = _attention(kind, train)
    model: nn.Module = kind(config)
    return model.to(getattr(torch, dtype or "float32"))


def _attention(kind: Any, train: TrainSpec) -> str:
    """The attention that was asked for, or eager where the family has no fused one (Gemma 2 caps its scores)."""
    if train.attention == "eager" or getattr(kind, "_supports_sdpa", True):
        return train.attention
    _say_eager(kind.__name__)
    return "eager"


@functools.cache
def _say_eager(name: str) -> None:
    log.warning("%s has no fused attention: its step is simulated with eager attention.", name)


def _read_config(source: str | Path) -> Any:
    from transformers import AutoConfig

    if isinstance(source, Path) and source.name == "config.json":
        source = source.parent
    if isinstance(source, Path) and source.is_file():
        raise ValueError(
            f"{source} is a file: a saved spec has sizes but no code to run. To simulate, give the model's folder, its "
            "hub id, or a function that builds it."
        )
    try:
        return AutoConfig.from_pretrained(str(source))
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"There is no model to simulate at {str(source)!r}: {first_line} Give a folder with a config.json, a hub id, "
            "or a function that builds the module."
        ) from error


def _model_class(config: Any) -> Any:
    """The class the config names, else the causal language model of its type."""
    import transformers

    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    known = transformers.AutoModelForCausalLM._model_mapping
    if type(config) in known:
        return known[type(config)]
    raise ValueError(
        f"transformers has no causal language model for model_type={config.model_type!r}. Give a function that builds a "
        "LightningModule around it."
    )


def to_fake(root: nn.Module) -> None:
    """Replace every parameter and buffer by a fake CPU tensor of its shape and type, ties kept.

    In place of ``root.to_empty("cpu")``, which cannot swap fake tensors in. Call it under the fake mode.
    """
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for module in root.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = (tensor, _fake_like(tensor))  # an id is only unique among the living
                store[name] = made[id(tensor)][1]  # type: ignore[assignment]


def _fake_like(tensor: Tensor) -> Tensor:
    fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake
