"""Merging holds one file of the base and one layer, however large the model is."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.llama import llama_config, make_tokens
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from lightning_shard import TunedDDPStrategy, lora
from lightning_shard.checkpoint import export_merged as merging
from lightning_shard.testing import run_ranks
from lightning_shard.testing.parity import QUIET

MB = 10**6


class Adapted(LightningModule):
    def __init__(self, folder: str) -> None:
        super().__init__()
        self.model: Any = lora(AutoModelForCausalLM.from_pretrained(folder), r=4, target_modules="all-linear")

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch[0], labels=batch[0]).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def train(base: str, path: str) -> None:
    torch.manual_seed(1)
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}
    LlamaForCausalLM(llama_config(**sizes)).save_pretrained(base, max_shard_size="60MB")
    trainer = Trainer(**QUIET, strategy=TunedDDPStrategy(), devices=1, max_steps=1)  # type: ignore[arg-type]
    trainer.fit(Adapted(base), make_tokens(0, 1))
    trainer.save_checkpoint(path)


def live_bytes() -> int:
    """Of all tensors that are reachable. (What the process holds says less: freed memory stays with it.)"""
    gc.collect()
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and each.device.type == "cpu"]
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def merge(path: str, target: str) -> int:
    """Bytes held at the fullest, looked at after every tensor and before every file is written."""
    held: list[int] = []

    def watched(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            held.append(live_bytes())
            return result

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "_merged", watched(merging._merged))
        patch.setattr(merging, "save_file", watched(merging.save_file))
        before = live_bytes()
        merging.export_merged(Path(path), Path(target))
    return max(held) - before


@pytest.mark.slow
def test_merging_holds_one_file_and_one_layer(tmp_path: Path) -> None:
    base, path = tmp_path / "base", tmp_path / "x.ckpt"
    run_ranks(1, train, str(base), str(path))
    files = [file.stat().st_size for file in base.glob("*.safetensors")]
    largest_layer, adapters = 4 * 1024 * 2816, 8 * MB
    assert sum(files) > 5 * max(files)
    (peak,) = run_ranks(1, merge, str(path), str(tmp_path / "merged"))
    assert max(files) / 2 < peak < max(files) + largest_layer + adapters
