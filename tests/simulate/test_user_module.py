"""A user's LightningModule is simulated as it is: its own model, step and optimizer."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.llama import TinyLlama, llama_config, make_llama
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_shard.finetune import CausalLM
from lightning_shard.plans import Plan
from lightning_shard.simulate import simulate
from lightning_shard.specs import AdapterSpec, TrainSpec

TOKENS = torch.zeros(2, 16, dtype=torch.long)
TRAIN = TrainSpec(micro_batch_size=2, seq_len=16)
PLANS = [Plan(), Plan(dp_replicate=2), Plan(dp_shard=2)]


@pytest.mark.parametrize("plan", PLANS, ids=["one", "ddp", "fsdp2"])
@pytest.mark.parametrize("training", ["full", "lora"])
@pytest.mark.parametrize("late", [False, True])
def test_a_lightning_module_takes_what_the_same_model_takes(plan: Plan, training: Any, late: bool) -> None:
    adapter = AdapterSpec(r=4) if training == "lora" else None
    train = dataclasses.replace(TRAIN, adapter=adapter, gradients_cleared="before_backward")
    plain = simulate(make_llama, train, plan)
    user = simulate(lambda: TinyLlama(training, late=late), TRAIN, plan, batch=[TOKENS])
    assert user.kinds == plain.kinds
    assert user.collectives == plain.collectives


def test_a_live_module_is_left_alone() -> None:
    module = TinyLlama("lora")
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    result = simulate(module, TRAIN, Plan(dp_shard=2), batch=[TOKENS])
    after = module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert module._trainer is None
    assert simulate(lambda: TinyLlama("lora"), TRAIN, Plan(dp_shard=2), batch=[TOKENS]).kinds == result.kinds


@pytest.mark.parametrize("plan", PLANS, ids=["one", "ddp", "fsdp2"])
def test_the_recipes_module_is_simulated_from_its_folder(tmp_path: Path, plan: Plan) -> None:
    llama_config().save_pretrained(tmp_path)
    module = lambda: CausalLM(str(tmp_path), AdapterSpec(r=4))  # noqa: E731
    result = simulate(module, TRAIN, plan)
    assert result.kinds["trained_weights"] < result.kinds["frozen_weights"] * 2
    assert result.guessed_branches > 0  # which tokens carry a loss
    assert any("guessed" in note for note in result.not_modelled)


class Net(LightningModule):
    """Not a language model at all; logs, and configures its optimizer the long way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def training_step(self, batch: dict[str, Tensor], _: int) -> dict[str, Tensor]:
        x = batch["x"]
        for layer in self.layers:
            x = layer(x).relu()
        loss = nn.functional.mse_loss(x, batch["y"])
        self.log("loss", loss)
        self.log_dict({"a": loss})
        return {"loss": loss}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize("plan", PLANS, ids=["one", "ddp", "fsdp2"])
def test_any_module_with_its_own_optimizer(plan: Plan) -> None:
    batch = {"x": torch.zeros(8, 32), "y": torch.zeros(8, 32)}
    result = simulate(Net, TrainSpec(precision="32-true"), plan, batch=batch)
    last = result.moments[-1].kinds
    assert last["optimizer_state"] == last["trained_weights"]  # one momentum


def test_an_unknown_batch_is_asked_for() -> None:
    with pytest.raises(ValueError, match="What a batch of Net looks like is not known. Pass batch="):
        simulate(Net, TRAIN, Plan())


def test_an_adapter_twice_is_refused() -> None:
    train = TrainSpec(adapter=AdapterSpec())
    with pytest.raises(ValueError, match="train.adapter asks for an adapter as well"):
        simulate(Net, train, Plan(), batch=TOKENS)


def test_manual_optimization_is_refused() -> None:
    class Manual(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(ValueError, match="manual optimization"):
        simulate(Manual, TRAIN, Plan(), batch=TOKENS)


def test_a_step_without_a_loss_is_refused() -> None:
    class Lossless(Net):
        def training_step(self, batch: Tensor, _: int) -> None:  # type: ignore[override]
            return None

    with pytest.raises(ValueError, match="training_step returned NoneType: a simulated step needs a loss"):
        simulate(Lossless, TRAIN, Plan(), batch=TOKENS)
