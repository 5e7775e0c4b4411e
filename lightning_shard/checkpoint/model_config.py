"""The config of the transformers model in a LightningModule, kept with the weights so that they can be exported."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from lightning_shard.checkpoint.names import plain_name

CONFIG = "model"


def config_writer(root: nn.Module) -> Callable[[Path], None] | None:
    """What writes the config of the outermost transformers model below a folder; None where there is none."""
    for name, module in root.named_modules():
        config: Any = getattr(module, "config", None)
        if (
            hasattr(module, "_init_weights")
            and hasattr(config, "save_pretrained")
            and not hasattr(module, "peft_config")
        ):
            return _writer(module, config, plain_name(f"{name}." if name else ""))
    return None


def _writer(model: nn.Module, config: Any, prefix: str) -> Callable[[Path], None]:
    architecture = [type(model).__name__.removeprefix("FSDP")]  # FSDP2 puts its name before the class's

    def write(folder: Path) -> None:
        target = folder / CONFIG
        config.save_pretrained(target)
        file = target / "config.json"
        content = json.loads(file.read_text())
        content["architectures"] = content.get("architectures") or architecture
        file.write_text(json.dumps(content, indent=2))
        generation = getattr(model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(target)
        (target / "place.json").write_text(json.dumps({"prefix": prefix}))

    return write
