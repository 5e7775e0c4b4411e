"""Encoder-decoders, vision models and frozen towers: the numbers of one process under every layout."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_shard import FSDP2Strategy, lora
from lightning_shard.testing import GlobalBatchSampler, assert_parity, run_ranks, run_trainer

NUM_SAMPLES = 24
TEXT = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION = {**TEXT, "image_size": 8, "patch_size": 4}
LAYOUTS: dict[str, Any] = {
    "ddp": "tuned-ddp",
    "fsdp2": "fsdp2",
    "half-resident": partial(FSDP2Strategy, adapters="replicated", resident_blocks=2),
}


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=64, **sizes, dropout_rate=0.0, decoder_start_token_id=0))


def t5_with_lora() -> Any:
    return lora(t5(), r=4, seed=7, target_modules=["q", "v"])


def t5_with_a_frozen_encoder() -> Any:
    model = t5()
    model.encoder.block.requires_grad_(False)
    return model


def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(**VISION, **quiet))


def vit_with_lora() -> Any:
    return lora(vit(), r=4, seed=7, target_modules=["q_proj", "v_proj"], modules_to_save=["classifier"])


def clip(*, frozen_tower: bool = False) -> Any:
    from transformers import CLIPConfig, CLIPModel

    text = {**TEXT, "vocab_size": 64, "projection_dim": 8, "max_position_embeddings": 16, "eos_token_id": 63}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config={**VISION, "projection_dim": 8}, projection_dim=8))
    if frozen_tower:
        model.vision_model.requires_grad_(False)
    return model


class Family(LightningModule):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = make().train()
        for name, parameter in self.model.named_parameters():
            if name.endswith("k_proj.bias"):
                parameter.requires_grad_(False)  # a softmax takes no notice of it: its gradient is rounding, no number

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        tokens, pixels, labels = batch
        kind = type(self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model).__name__
        if kind.startswith("CLIP"):
            output = self.model(pixel_values=pixels, input_ids=tokens)
            return (output.image_embeds - output.text_embeds).pow(2).mean() + output.logits_per_image.diagonal().mean()
        if kind.startswith("ViT"):
            return self.model(pixel_values=pixels, labels=labels).loss  # type: ignore[no-any-return]
        return self.model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def make_pairs(rank: int, world_size: int) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 64, (NUM_SAMPLES, 8), generator=generator)
    pixels = torch.randn(NUM_SAMPLES, 3, 8, 8, generator=generator)
    labels = torch.randint(0, 2, (NUM_SAMPLES,), generator=generator)
    sampler = GlobalBatchSampler(NUM_SAMPLES, 8, rank=rank, world_size=world_size)
    return DataLoader(TensorDataset(tokens, pixels, labels), batch_sampler=sampler)


FAMILIES: dict[str, Callable[[], Any]] = {
    "encoder-decoder": t5,
    "encoder-decoder-lora": t5_with_lora,
    "frozen-encoder": t5_with_a_frozen_encoder,
    "vision": vit,
    "vision-lora": vit_with_lora,
    "frozen-tower": partial(clip, frozen_tower=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_family_keeps_its_numbers(layout: str, family: str) -> None:
    make = partial(Family, FAMILIES[family])
    options = {"max_steps": 3, "gradient_clip_val": 0.5}
    (expected,) = run_ranks(1, run_trainer, make, make_pairs, **options)
    for result in run_ranks(2, run_trainer, make, make_pairs, strategy=LAYOUTS[layout], **options):
        assert_parity(result, expected, rtol=2e-5)
