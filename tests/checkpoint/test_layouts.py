"""The round trip over plans and numbers of ranks: losses after the resume are those of one process (H1)."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.llama import AdaptedVocabulary, TinyLlama, make_llama, make_tokens
from helpers.resuming import Kind, losses_of
from lightning.pytorch import Trainer
from peft import PeftModel
from torch import distributed as dist

from lightning_shard import FSDP2Strategy, Plan, TunedDDPStrategy
from lightning_shard.testing import run_ranks
from lightning_shard.testing.parity import QUIET, trained_parameters

pytestmark = pytest.mark.slow
WHOLE_ADAPTERS = Plan(dp_shard=2, adapters="replicated", resident_blocks=1)
LAYOUTS: dict[str, tuple[int, Any]] = {
    "one": (1, TunedDDPStrategy),
    "ddp-2": (2, TunedDDPStrategy),
    "fsdp2-2": (2, FSDP2Strategy),
    "resident-2": (2, partial(FSDP2Strategy, WHOLE_ADAPTERS)),
    "ddp-3": (3, TunedDDPStrategy),
    "fsdp2-3": (3, FSDP2Strategy),
    "offloaded-2": (2, partial(FSDP2Strategy, Plan(dp_shard=2, offload="all"))),
    "host-optimizer-2": (2, partial(FSDP2Strategy, Plan(dp_shard=2, offload="optimizer"))),
    "fsdp2-4": (4, FSDP2Strategy),
    "hsdp-2x2": (4, partial(FSDP2Strategy, dp_shard=2)),
}


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_any_layout_reads_any_layouts_checkpoint(kind: Kind, tmp_path: Path) -> None:
    names = list(LAYOUTS)
    whole = losses("one", kind, tmp_path / "one")
    for name in names[1:]:
        losses(name, kind, tmp_path / name)
    pairs = {("one", name) for name in names} | {(name, "one") for name in names}
    pairs |= {(name, names[(i + 3) % len(names)]) for i, name in enumerate(names)}
    for before, after in sorted(pairs):
        rest = losses(after, kind, tmp_path / "rest", ckpt=tmp_path / before / "step=5.ckpt")
        torch.testing.assert_close(
            torch.tensor(rest),
            torch.tensor(whole[5:]),
            rtol=1e-5,
            atol=1e-8,
            msg=lambda m, b=before, a=after: f"{b}->{a}: {m}",
        )


def losses(layout: str, kind: Kind, folder: Path, ckpt: Path | None = None) -> list[float]:
    num_ranks, make = LAYOUTS[layout]
    return run_ranks(num_ranks, losses_of, make, kind, folder, steps=10, ckpt=ckpt)[0][0]


def go_on(make: Any, model: str, path: Path, steps: int, *, resume: bool) -> dict[str, torch.Tensor]:
    module = MODELS[model]()
    strategy = make()
    trainer = Trainer(**QUIET, strategy=strategy, devices=dist.get_world_size(), max_steps=steps)
    tp = strategy.fixed_plan().tp if strategy.fixed_plan() else 1
    data = make_tokens(dist.get_rank() // tp, dist.get_world_size() // tp)
    trainer.fit(module, data, ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    return trained_parameters(module)


class Uneven(TinyLlama):
    """Each tensor-parallel rank's 33 rows of the vocabulary are shared unevenly."""

    def _build(self) -> None:
        self.model = make_llama(tied=True, vocab_size=66)


MODELS = {
    "tied": Uneven,
    "vocabulary-dora": partial(AdaptedVocabulary, "dora"),
    "vocabulary-saved": partial(AdaptedVocabulary, "full"),
}


@pytest.mark.parametrize(
    ("before", "model"), [("tp", "tied"), ("tp", "vocabulary-dora"), ("fsdp2", "vocabulary-saved")]
)
def test_tensor_parallel_shards_are_read_by_others_and_read_theirs(before: str, model: str, tmp_path: Path) -> None:
    made = {"tp": partial(FSDP2Strategy, Plan(dp_shard=2, tp=2)), "fsdp2": partial(FSDP2Strategy, Plan(dp_shard=4))}
    after = "fsdp2" if before == "tp" else "tp"
    whole = run_ranks(1, go_on, TunedDDPStrategy, model, tmp_path / "w.ckpt", 4, resume=False)[0]
    saved = run_ranks(4, go_on, made[before], model, tmp_path / "x.ckpt", 2, resume=False)[0]
    resumed = run_ranks(4, go_on, made[after], model, tmp_path / "x.ckpt", 4, resume=True)[0]
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-4, atol=1e-5)
    if model != "tied":
        adapter = PeftModel.from_pretrained(make_llama(), tmp_path / "x.ckpt" / "adapter", is_trainable=True)
        held = {f"model.{name}": value for name, value in adapter.named_parameters() if value.requires_grad}
        assert held.keys() == saved.keys()
        assert all(torch.equal(held[name], value) for name, value in saved.items())
