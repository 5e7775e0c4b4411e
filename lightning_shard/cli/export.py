"""``lightning-shard export``: from a checkpoint to what peft, transformers and Lightning load."""

import argparse
import json
import re
import tempfile
import warnings
from pathlib import Path

DTYPES = ("float32", "bfloat16", "float16")


def main(argv: list[str]) -> int:
    """Export one checkpoint."""
    arguments = _parser().parse_args(argv)
    if "://" not in arguments.checkpoint:
        return _export(arguments, Path(arguments.checkpoint))
    from lightning_shard.checkpoint.remote import RemotePath

    source = RemotePath(arguments.checkpoint)
    if arguments.output is None or not source.is_dir():
        raise ValueError(f"There is no checkpoint folder at {source}, or no --output says where to write it.")
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as name:
        source.fetch(Path(name, source.name))
        return _export(arguments, Path(name, source.name))


def _export(arguments: argparse.Namespace, source: Path) -> int:
    import torch

    # peft and transformers among themselves
    warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
    from lightning_shard.checkpoint.export import export_adapter, export_full
    from lightning_shard.checkpoint.export_merged import export_merged

    if not source.exists():
        raise ValueError(f"There is no checkpoint at {source}.")
    target: Path = arguments.output or source.with_name(f"{source.stem}-{arguments.to}")
    if target.exists():
        raise ValueError(f"{target} exists already. Remove it, or give another --output.")
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    if arguments.to == "adapter":
        export_adapter(source, target, dtype)
    elif arguments.to == "full":
        export_full(source, target, dtype, _bytes(arguments.max_shard_size))
    else:
        export_merged(source, target, dtype, arguments.base)
    print(json.dumps({"to": arguments.to, "output": str(target)}) if arguments.json else f"Wrote {target}.")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("lightning-shard export", description=__doc__)
    parser.add_argument(
        "checkpoint",
        help="a checkpoint that one of this package's strategies wrote, by path or URL (s3://...); or, for --to merged, a "
        "PEFT folder",
    )
    parser.add_argument(
        "--to",
        required=True,
        choices=("adapter", "full", "merged"),
        help="a PEFT folder; a model trained in full as a Hugging Face folder (or a Lightning file, where --output ends in "
        ".ckpt); adapters merged into their base",
    )
    parser.add_argument("--output", type=Path, help="folder to write; beside the checkpoint by default")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights; as stored by default")
    parser.add_argument(
        "--base", help="folder or hub id of the base to merge into; the one it was trained on by default"
    )
    parser.add_argument("--max-shard-size", default="5GB", help="largest weights file, such as 5GB or 500MB")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    return parser


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMG]?B)", text.strip(), re.IGNORECASE)
    if match is None or not int(match[1]):
        raise ValueError(f"--max-shard-size {text} is no size. Give a number and a unit, such as 5GB.")
    return int(match[1]) * {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}[match[2].upper()]
