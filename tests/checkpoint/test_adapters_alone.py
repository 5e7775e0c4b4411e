"""With adapters only what trains is saved: whole, by peft's names, on a base that is known again (G1, G2, G5-G8, H2, H5)."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.llama import VOCABULARY, TinyLlama, make_llama, make_tokens
from helpers.resuming import losses_of
from lightning.pytorch import Trainer
from torch.distributed.tensor import DTensor

from lightning_shard import FSDP2Strategy, TunedDDPStrategy
from lightning_shard.checkpoint.directory import open_directory
from lightning_shard.testing import run_ranks
from lightning_shard.testing.parity import QUIET, trained_parameters

IDS = torch.arange(VOCABULARY)[None, :12]


def train_and_save(strategy: Any, path: Path, *, fill: bool = False, tied: bool = False) -> dict[str, Any]:
    """What was trained, logits of the model, and what the save sent."""
    module = TinyLlama("lora", tied=tied)
    trainer = Trainer(**QUIET, strategy=strategy(), devices=dist.get_world_size(), max_steps=2)
    trainer.fit(module, make_tokens(dist.get_rank(), dist.get_world_size()))
    if fill:
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and isinstance(parameter, DTensor):
                with torch.no_grad():
                    parameter.to_local().fill_(1.0 + dist.get_rank() + (0.5 if "lora_B" in name else 0.0))
    gathered: list[int] = []
    redistribute = DTensor.redistribute

    def counted(self: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        gathered.append(self.numel())
        return redistribute(self, *args, **kwargs)

    DTensor.redistribute = counted  # type: ignore[method-assign]
    trainer.save_checkpoint(path)
    DTensor.redistribute = redistribute  # type: ignore[method-assign]
    trained = trained_parameters(module)
    return {"trained": trained, "gathered": sum(gathered), "numel": sum(v.numel() for v in trained.values())}


@pytest.mark.parametrize("save_frozen", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_every_ranks_part_is_in_the_checkpoint_and_the_base_is_neither_saved_nor_gathered(
    save_frozen: bool | None, tmp_path: Path
) -> None:
    make = partial(FSDP2Strategy, save_frozen=save_frozen)
    result, _ = run_ranks(2, train_and_save, make, tmp_path / "a.ckpt", fill=True)
    opened = open_directory(tmp_path / "a.ckpt", weights_only=None)
    model = {name.removeprefix("model/") for name in opened.tensors.names if name.startswith("model/")}
    for name, value in result["trained"].items():
        assert torch.equal(opened.tensors.read_whole(f"model/{name}"), value)
        assert {1.0, 2.0} <= {float(v) // 1 for v in value.unique()}  # both ranks' constants
    if save_frozen is None:
        assert model == set(result["trained"])
        assert result["gathered"] == result["numel"]  # the adapters, once, for the PEFT folder; nothing of the base
        stored = sum(opened.tensors.size(name).numel() for name in opened.tensors.names)
        steps = len(result["trained"])
        assert stored == 3 * result["numel"] + steps  # weights and two moments of what trains, and its step counts


@pytest.mark.parametrize("layout", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_the_peft_folder_loads_plainly_with_the_trained_models_logits(layout: str, tmp_path: Path) -> None:
    from peft import PeftModel

    strategy = {"ddp": TunedDDPStrategy, "fsdp2": FSDP2Strategy}[layout]
    result, _ = run_ranks(2, train_and_save, strategy, tmp_path / "a.ckpt")
    folder = tmp_path / "a.ckpt" / "adapter"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["peft_type"]) == (4, "LORA")
    assert any(name.endswith("q_proj") for name in config["target_modules"])
    loaded = PeftModel.from_pretrained(make_llama(), folder).eval()
    module = TinyLlama("lora")
    module.load_state_dict(result["trained"], strict=False)
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, module.model.eval()(IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("after", "form"),
    [
        ("fsdp2", "directory"),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in (("ddp", "directory"), ("ddp", "file"), ("fsdp2", "file"))),
    ],
)
def test_groups_keep_their_own_rates_and_moments_under_another_strategy(after: str, form: Any, tmp_path: Path) -> None:
    made = {"ddp": TunedDDPStrategy, "fsdp2": FSDP2Strategy}
    before = made["fsdp2" if after == "ddp" else "ddp"]
    kind = "lora" if form == "directory" else "by-hand"
    run = partial(run_ranks, 2, losses_of, kind=kind, folder=tmp_path, steps=10)
    whole, rates = run(make_strategy=partial(before, checkpoint_format=form))[0]
    rest, rates_after = run(make_strategy=made[after], ckpt=tmp_path / "step=5.ckpt")[0]
    assert rates_after == rates
    assert rates[0] != rates[1]
    torch.testing.assert_close(torch.tensor(rest), torch.tensor(whole[5:]), rtol=1e-5, atol=1e-8)


def resume_on_another_base(path: Path) -> str:
    module = TinyLlama("lora")
    with torch.no_grad():
        module.model.base_model.model.model.layers[1].mlp.up_proj.base_layer.weight[3, 2] += 1.0
    trainer = Trainer(**QUIET, strategy=FSDP2Strategy(), devices=dist.get_world_size(), max_steps=4)
    try:
        trainer.fit(module, make_tokens(dist.get_rank(), dist.get_world_size()), ckpt_path=path)
    except RuntimeError as error:
        return str(error)
    return ""


def test_another_base_is_refused_on_all_ranks_naming_what_differs(tmp_path: Path) -> None:
    run_ranks(2, train_and_save, TunedDDPStrategy, tmp_path / "a.ckpt")
    for message in run_ranks(2, resume_on_another_base, tmp_path / "a.ckpt"):
        assert "1 of " in message
        assert "layers.1.mlp.up_proj.base_layer.weight" in message
