"""What can be set right or found wrong before any process is started."""

import difflib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import StrategyRegistry

from lightning_shard.integrations.launched import launched
from lightning_shard.specs import AdapterSpec


def prepare(script: Path) -> None:
    """Run a recipe's script, which fetches or builds what is not there yet."""
    if not script.is_file():
        raise ValueError(
            f"prepare names {str(script)!r}, which does not exist (looked from {Path.cwd()}). Scripts are found from "
            "the folder the command is run in: run it where the recipe's header says, or give --prepare []."
        )
    code = subprocess.run([sys.executable, str(script)], check=False).returncode
    if code:
        raise RuntimeError(f"{script} ended with exit code {code}; its own message stands above. Nothing was trained.")


def require_strategy(strategy: Any) -> None:
    """Raise ValueError for a name that no strategy is registered under."""
    names = ["auto", *StrategyRegistry.available_strategies()]
    if not isinstance(strategy, str) or strategy.lower() in names:
        return
    close = difflib.get_close_matches(strategy.lower(), names, n=1)
    meant = f"Did you mean {close[0]!r}? " if close else ""
    raise ValueError(
        f"trainer.strategy={strategy!r} is not known. {meant}Give one of the registered names or a class_path. "
        f"Registered: {', '.join(sorted(names))}."
    )


def require_checkpoint(path: str | None) -> None:
    """Raise ValueError for a checkpoint to go on from that is not there; words such as 'last' are Lightning's."""
    if path is not None and path not in ("last", "best", "hpc", "registry") and not Path(path).exists():
        raise ValueError(
            f"--resume {path!r} does not exist (looked from {Path.cwd()}). Give a checkpoint of an earlier run, or 'last'."
        )


def require_adapter(lora: Any) -> None:
    """Raise ValueError for fields of an adapter that are out of range, in their own words rather than the parser's."""
    if lora is not None:
        try:
            AdapterSpec(**vars(lora))
        except ValueError as error:
            raise ValueError(f"model.lora: {error}") from None


def settle_world(trainer: Any, cpu_processes: int, environment: Mapping[str, str] | None = None) -> None:
    """Give ``trainer`` (its arguments) the nodes and devices that torchrun or SLURM started; alone, this machine's.

    Args:
        trainer: arguments of a recipe's Trainer; ``num_nodes`` and ``devices`` are set in place.
        cpu_processes: what ``devices: auto`` means on a machine without GPUs that nobody launched processes on.
        environment: the launcher's variables; this process's by default.

    Raises:
        ValueError: when the recipe names other numbers than the launcher started.
    """
    found = launched(environment)
    if not found:
        if trainer.devices == "auto":
            without = trainer.accelerator == "cpu" or (
                trainer.accelerator == "auto" and not torch.accelerator.is_available()
            )
            trainer.devices = cpu_processes if without else "auto"
        return
    _require_launched("num_nodes", trainer.num_nodes, found, left_open=(1, None))
    _require_launched("devices", trainer.devices, found, left_open=("auto", -1, "-1"))
    trainer.num_nodes, trainer.devices = found["num_nodes"], found["devices"]


def _require_launched(name: str, asked: Any, found: dict[str, int], left_open: tuple[Any, ...]) -> None:
    asked = len(asked) if isinstance(asked, list) else asked
    if asked not in left_open and str(asked) != str(found[name]):
        raise ValueError(
            f"trainer.{name}={asked!r}, but the launcher (torchrun or SLURM) started {found['num_nodes']} nodes with "
            f"{found['devices']} processes each. Leave trainer.num_nodes and trainer.devices out, or launch as many."
        )
