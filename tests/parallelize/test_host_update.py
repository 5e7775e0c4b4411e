"""Optimizer state in host memory: where it lives, that the numbers stay, and that checkpoints come and go."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.llama import EPS, TinyLlama, make_llama, make_tokens
from lightning.pytorch import Trainer
from torch import Tensor
from torch import distributed as dist
from torch.distributed.tensor import DTensor

from lightning_shard import FSDP2Strategy, Plan, TrainSpec, TunedDDPStrategy
from lightning_shard.simulate import simulate
from lightning_shard.testing import assert_parity, run_ranks, run_trainer
from lightning_shard.testing.parity import QUIET, trained_parameters

ON_HOST: dict[str, tuple[int, Any]] = {
    "one": (1, partial(TunedDDPStrategy, offload="optimizer")),
    "ddp-2": (2, partial(TunedDDPStrategy, offload="optimizer")),
    "fsdp2-2": (2, partial(FSDP2Strategy, offload="optimizer")),
}


def local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


class Noting(torch.optim.AdamW):
    """Notes what an update reads."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.updated = [p for group in self.param_groups for p in group["params"]]
        return result


class Watched(TinyLlama):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return Noting(trained, lr=self.lr, eps=EPS)


def where_it_is(strategy: Any) -> dict[str, Any]:
    module = Watched("lora")
    trainer = Trainer(**QUIET, strategy=strategy(), devices=dist.get_world_size(), max_steps=2)
    trainer.fit(module, make_tokens(dist.get_rank(), dist.get_world_size()))
    optimizer: Any = trainer.optimizers[0]
    trained = [p for p in module.parameters() if p.requires_grad]
    return {
        "groups": all(a is b for a, b in zip(optimizer.param_groups[0]["params"], trained, strict=True)),
        "stood_in": all(a is not b and a.device.type == "cpu" for a, b in zip(optimizer.updated, trained, strict=True)),
        "apart": {local(p).data_ptr() for p in optimizer.updated}.isdisjoint(local(p).data_ptr() for p in trained),
        "state": all(optimizer.state[p]["exp_avg"].device.type == "cpu" for p in trained),
        "entries": len(optimizer.state) == len(trained),
    }


@pytest.mark.parametrize("layout", ["ddp-2", "fsdp2-2"])
def test_the_update_reads_host_memory_and_the_optimizer_knows_the_parameters(layout: str) -> None:
    num_ranks, strategy = ON_HOST[layout]
    for seen in run_ranks(num_ranks, where_it_is, strategy):
        assert seen == dict.fromkeys(seen, True)


@pytest.mark.parametrize(
    ("layout", "precision"),
    [
        ("one", "32-true"),
        ("ddp-2", "bf16-true"),
        pytest.param("fsdp2-2", "bf16-true", marks=pytest.mark.slow),
        ("fsdp2-2", "16-mixed"),
    ],
)
def test_the_numbers_are_those_of_an_update_on_the_device(layout: str, precision: str) -> None:
    num_ranks, strategy = ON_HOST[layout]
    make = partial(TinyLlama, "full" if layout == "one" else "lora")
    options = {"precision": precision, "max_steps": 4, "gradient_clip_val": 0.1, "accumulate_grad_batches": 2}
    plain = run_ranks(num_ranks, run_trainer, make, make_tokens, strategy=strategy.func, **options)[0]
    for result in run_ranks(num_ranks, run_trainer, make, make_tokens, strategy=strategy, **options):
        assert_parity(result, plain, rtol=0)


def go_on(strategy: Any, path: Path, steps: int, *, resume: bool, save: bool, form: str) -> dict[str, Tensor]:
    module = TinyLlama("lora")
    trainer = Trainer(
        **QUIET, strategy=strategy(checkpoint_format=form), devices=dist.get_world_size(), max_steps=steps
    )
    trainer.fit(module, make_tokens(dist.get_rank(), dist.get_world_size()), ckpt_path=path if resume else None)
    if save:
        trainer.save_checkpoint(path)
    return trained_parameters(module)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["directory", "file"])
def test_checkpoints_go_to_other_plans_and_come_from_them(form: str, tmp_path: Path) -> None:
    whole = run_ranks(1, go_on, TunedDDPStrategy, tmp_path, 4, resume=False, save=False, form=form)[0]
    away, here = tmp_path / "away.ckpt", tmp_path / "here.ckpt"
    run_ranks(2, go_on, ON_HOST["fsdp2-2"][1], away, 2, resume=False, save=True, form=form)
    run_ranks(1, go_on, TunedDDPStrategy, here, 2, resume=False, save=True, form=form)
    for num_ranks, strategy, path in (
        (1, TunedDDPStrategy, away),
        (*ON_HOST["ddp-2"], away),
        (*ON_HOST["fsdp2-2"], here),
    ):
        after = run_ranks(num_ranks, go_on, strategy, path, 4, resume=True, save=False, form=form)[0]
        for name, value in whole.items():
            torch.testing.assert_close(after[name], value, rtol=1e-4, atol=1e-6)


class WithLbfgs(TinyLlama):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters())


def test_an_optimizer_that_keeps_a_list_of_the_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match="offload='optimizer' cannot run LBFGS"):
        run_trainer(WithLbfgs, make_tokens, strategy=ON_HOST["one"][1], max_steps=1)


@pytest.mark.parametrize("make", [TunedDDPStrategy, FSDP2Strategy])
def test_saved_state_can_be_gathered_on_the_host(make: Any) -> None:
    strategy = make(offload="optimizer")
    strategy.parallel_devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    strategy._local_rank = 0
    assert strategy._get_process_group_backend() == "cpu:gloo,cuda:nccl"


def test_a_simulated_step_holds_no_state_on_the_device() -> None:
    train = TrainSpec(seq_len=16)
    for layout in ({"dp_shard": 2}, {"dp_replicate": 2}):
        plan = Plan(**layout, offload="optimizer")  # type: ignore[arg-type]
        here, away = simulate(make_llama, train, Plan(**layout)), simulate(make_llama, train, plan)  # type: ignore[arg-type]
        for before, moment in zip(here.moments, away.moments, strict=True):
            gone = before.kinds.get("optimizer_state", 0) + before.kinds.get("optimizer_step", 0)
            assert gone > 0
            assert moment.allocated_bytes == before.allocated_bytes - gone
        assert away.collectives == here.collectives
