"""Result files: one JSON line per result, with all that is needed to run it again."""

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.options import Options, Row

HERE = Path(__file__).parent
RESULTS = str(HERE / "results")
PACKAGES = ("torch", "lightning", "transformers", "peft", "accelerate", "deepspeed", "litgpt")


def save(name: str, rows: list[Row], options: Options, folder: str) -> None:
    """Keep the rows, in place of older ones of the same case and device."""
    file = Path(folder, f"{name}.jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    context = {"benchmark": name, "device": options.device, **describe_run(options)}
    mine = {(row["case"], options.device) for row in rows}
    kept = [row for row in read(name, folder) if (row["case"], row["device"]) not in mine]
    lines = [json.dumps(row) for row in [*kept, *({**row, **context} for row in rows)]]
    aside = file.with_suffix(".part")
    aside.write_text("".join(f"{line}\n" for line in lines))
    aside.replace(file)


def read(name: str, folder: str = RESULTS) -> list[Row]:
    """The rows of a benchmark; none where it has not run."""
    file = Path(folder, f"{name}.jsonl")
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]


def describe_run(options: Options) -> dict[str, Any]:
    """Date, command, versions and hardware of this run."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "command": options.command,
        "commit": _commit(),
        "versions": {"python": platform.python_version(), **_versions()},
        "hardware": {**_machine(), **_accelerator(options.device)},
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    """The last commit that changed the package, with a plus sign where files differ from it; empty outside a clone."""
    try:
        commit = _git("log", "-1", "--format=%h", "--", "lightning_shard")
        return commit + ("+" if _git("status", "--porcelain", "--untracked-files=no", "lightning_shard") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str) -> str:
    run = subprocess.run(["git", "-C", str(HERE.parent), *arguments], capture_output=True, text=True, check=True)
    return run.stdout.strip()


def _machine() -> dict[str, Any]:
    names = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    load = round(os.getloadavg()[0], 1)
    return {"cpu": names[0] if names else "", "cores": os.cpu_count(), "memory_bytes": pages, "load_after": load}


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _accelerator(device: str) -> dict[str, Any]:
    if device != "cuda":
        return {}
    import torch

    return {"gpu": torch.cuda.get_device_name(0), "gpus": torch.cuda.device_count(), "cuda": torch.version.cuda}
