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

from lightning_shard import FSDP2Strategy, TunedDDPStrategy, lora
from lightning_shard.checkpoint import gathering
from lightning_shard.checkpoint.directory import open_directory
from lightning_shard.checkpoint.export_merged import export_merged
from lightning_shard.checkpoint.names import plain_name
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
    sent: list[int] = []
    redistribute, send = DTensor.redistribute, gathering._gather_bytes

    def redistributed(self: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        sent.append(self.numel() * self.element_size())
        return redistribute(self, *args, **kwargs)

    def gathered(parts: list[torch.Tensor], *args: Any) -> list[torch.Tensor]:
        sent.append(sum(part.numel() * part.element_size() for part in parts))
        return send(parts, *args)

    DTensor.redistribute, gathering._gather_bytes = redistributed, gathered  # type: ignore[method-assign]
    trainer.save_checkpoint(path)
    DTensor.redistribute, gathering._gather_bytes = redistribute, send  # type: ignore[method-assign]
    trained = trained_parameters(module)
    return {"trained": trained, "sent_bytes": sum(sent), "numel": sum(v.numel() for v in trained.values())}


@pytest.mark.parametrize("save_frozen", [None, pytest.param(True, marks=pytest.mark.slow)])
def test_every_ranks_part_is_in_the_checkpoint_and_the_base_is_neither_saved_nor_gathered(
    save_frozen: bool | None, tmp_path: Path
) -> None:
    """G1: every rank's constants are in the file. G6: no byte of the base travels. G8: its size is what trains."""
    make = partial(FSDP2Strategy, save_frozen=save_frozen)
    result, other = run_ranks(2, train_and_save, make, tmp_path / "a.ckpt", fill=True)
    opened = open_directory(tmp_path / "a.ckpt", weights_only=None)
    model = {name.removeprefix("model/") for name in opened.tensors.names if name.startswith("model/")}
    for name, value in result["trained"].items():
        assert torch.equal(opened.tensors.read_whole(f"model/{name}"), value)
        assert {1.0, 2.0} <= {float(v) // 1 for v in value.unique()}  # both ranks' constants
    if save_frozen is None:
        assert model == set(result["trained"])
        # The adapters, once, for the PEFT folder, and nothing of the base.
        assert result["sent_bytes"] + other["sent_bytes"] == 4 * result["numel"]
        stored = sum(opened.tensors.size(name).numel() for name in opened.tensors.names)
        steps = len(result["trained"])
        assert stored == 3 * result["numel"] + steps  # weights and two moments of what trains, and its step counts


@pytest.mark.parametrize("layout", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_the_peft_folder_loads_plainly_with_the_trained_models_logits(layout: str, tmp_path: Path) -> None:
    """G2, G7: a plain process loads it by its config, with the same logits to 1e-5."""
    from peft import PeftModel

    strategy = {"ddp": TunedDDPStrategy, "fsdp2": FSDP2Strategy}[layout]
    result, _ = run_ranks(2, train_and_save, strategy, tmp_path / "a.ckpt")
    folder = tmp_path / "a.ckpt" / "adapter"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (4, 8, "LORA")
    assert any(name.endswith("q_proj") for name in config["target_modules"])
    loaded = PeftModel.from_pretrained(make_llama(), folder).eval()
    module = TinyLlama("lora")
    module.load_state_dict(result["trained"], strict=False)
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, module.model.eval()(IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("after", "form", "kind"),
    [
        ("fsdp2", "directory", "lora"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("ddp", "directory", "lora"),
                ("ddp", "file", "lora"),
                ("fsdp2", "file", "lora"),
                ("ddp", "file", "by-hand"),
                ("fsdp2", "file", "by-hand"),
            )
        ),
    ],
)
def test_groups_keep_their_own_rates_and_moments_under_another_strategy(
    after: str, form: Any, kind: Any, tmp_path: Path
) -> None:
    """H2: two groups under one strategy, then the other. H5: adapters alone load strictly, in both forms."""
    made = {"ddp": TunedDDPStrategy, "fsdp2": FSDP2Strategy}
    before = made["fsdp2" if after == "ddp" else "ddp"]
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


def odd_adapters(path: Path) -> dict[str, Any]:
    """DoRA of rank 1, wrapped every way there is: magnitudes have one dimension, and ranks more shards than rows."""
    from peft import get_peft_model_state_dict
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    module = TinyLlama("full")
    model = lora(make_llama(), r=1, method="dora", target_modules=["q_proj", "down_proj"], seed=7)
    plain = set(get_peft_model_state_dict(model))
    layers = model.base_model.model.model.layers
    layers[0] = torch.compile(layers[0], backend="eager")
    layers[1] = checkpoint_wrapper(layers[1])
    module.model = model
    strategy = FSDP2Strategy(activation_checkpoint="full")
    trainer = Trainer(**QUIET, strategy=strategy, devices=dist.get_world_size(), max_steps=2)
    trainer.fit(module, make_tokens(dist.get_rank(), dist.get_world_size()))
    trainer.save_checkpoint(path)
    trained = {name: value for name, value in trained_parameters(module).items() if "lora" in name}
    return {"plain": plain, "trained": trained}


def test_adapters_of_one_dimension_and_of_fewer_rows_than_ranks_keep_their_plain_names(tmp_path: Path) -> None:
    """G2, G4: LoRA, checkpoint wrapper, compile and FSDP2 in one; keys as peft writes them, values whole."""
    from peft import PeftModel
    from safetensors.torch import load_file

    result, *_ = run_ranks(4, odd_adapters, tmp_path / "a.ckpt")
    names = open_directory(tmp_path / "a.ckpt", weights_only=None).tensors.names
    assert not any(wrapper in name for name in names for wrapper in ("_orig_mod", "_checkpoint_wrapped", "_fsdp"))
    folder = tmp_path / "a.ckpt" / "adapter"
    assert set(load_file(folder / "adapter_model.safetensors")) == result["plain"]
    loaded = PeftModel.from_pretrained(make_llama(), folder).eval()
    values = {plain_name(name): value for name, value in loaded.state_dict().items()}
    assert len(result["trained"]) == 3 * 2 * 3  # blocks, layers, and A, B and magnitude of each
    for name, value in result["trained"].items():
        assert torch.equal(values[plain_name(name).removeprefix("model.")], value), name


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["tied", "untied"])
def test_merging_what_two_ranks_trained_adds_the_product_of_the_adapters(tied: bool, tmp_path: Path) -> None:
    """G5: the merged weight is W + alpha / r * B @ A to 1e-6, tied embeddings included."""
    from safetensors.torch import load_file

    result, _ = run_ranks(2, train_and_save, FSDP2Strategy, tmp_path / "a.ckpt", tied=tied)
    base = make_llama(tied=tied)
    base.save_pretrained(tmp_path / "base")
    export_merged(tmp_path / "a.ckpt", tmp_path / "merged", base=str(tmp_path / "base"))
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    expected = dict(base.state_dict())
    changed = 0
    for name, a in result["trained"].items():
        if "lora_A" in name:
            b = result["trained"][name.replace("lora_A", "lora_B")]
            weight = name.partition("base_model.model.")[2].replace(".lora_A.default", "")
            expected[weight] = expected[weight] + 8 / 4 * b @ a
            changed += 1
    assert changed == 3 * 7
    for name, value in merged.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


def whole_values() -> tuple[int, set[str]]:
    strategy = FSDP2Strategy(checkpoint_format="file")
    trainer = Trainer(**QUIET, strategy=strategy, devices=dist.get_world_size(), max_steps=1)
    trainer.fit(TinyLlama("full"), make_tokens(dist.get_rank(), dist.get_world_size()))
    values = strategy.lightning_module_state_dict()
    moments = strategy.optimizer_state(trainer.optimizers[0])
    tensors = [*values.values(), *(v for state in moments.get("state", {}).values() for v in state.values())]
    return sum(v.numel() for v in tensors), {str(v.device) for v in tensors}


def test_a_full_file_is_gathered_on_the_host_of_one_rank() -> None:
    """G6: the others hold nothing of it."""
    (first, devices), (other, _) = run_ranks(2, whole_values)
    assert first > 3 * sum(p.numel() for p in make_llama().parameters())
    assert devices == {"cpu"}
    assert other == 0
