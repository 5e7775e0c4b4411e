"""A vocabulary split over ranks: the look-up, the logits, and the loss that reads them in parts."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.llama import VOCABULARY, make_llama
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional

from lightning_shard import lora
from lightning_shard.finetune import linear_loss
from lightning_shard.finetune.linear_loss import LogitRule, head_loss
from lightning_shard.parallelize.tensor import TensorParallel
from lightning_shard.parallelize.vocabulary import split_head
from lightning_shard.testing import count_collectives, run_ranks

RULES = {"plain": LogitRule(), "capped": LogitRule(scale=0.5, cap=2.0)}


def split(model: Any) -> Any:
    TensorParallel(model, init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))).apply(model)
    return model


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def reference(head: nn.Module, hidden: Tensor, targets: Tensor, rule: LogitRule) -> Tensor:
    return functional.cross_entropy(rule(head(hidden)).float(), targets, reduction="sum")


def loss_and_gradients(loss_of: Any, model: Any, rule: LogitRule) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 32, generator=generator).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (23,), generator=generator)
    loss = loss_of(model.get_output_embeddings(), hidden, targets, rule)
    (loss * 3).backward()
    trained = {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "hidden": whole(hidden.grad), **trained}


def adapted(targets: str | None) -> Any:
    model = make_llama()
    model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, VOCABULARY))
    if targets is None:
        return model
    return lora(model, r=4, seed=7, target_modules=["q_proj", "lm_head"] if targets == "lora" else ["q_proj"],
                modules_to_save=["lm_head"] if targets == "saved" else None)  # fmt: skip


@pytest.mark.parametrize("adapter", [None, "lora", "saved"])
def test_a_loss_of_parts_is_that_of_all_logits(adapter: str | None) -> None:
    run_ranks(2, losses_agree, adapter)


def losses_agree(adapter: str | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_loss, "CHUNK_TOKENS", 7)
        for rule in RULES.values():
            wanted = loss_and_gradients(reference, adapted(adapter), rule)
            model = split(adapted(adapter))
            for loss_of in (head_loss, reference):
                found = loss_and_gradients(loss_of, model, rule)
                assert found.keys() == wanted.keys()
                assert len(found) >= 4  # what trains in the head is among them
                for name, value in wanted.items():
                    torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5, msg=name)
                model.zero_grad()


def test_a_loss_of_parts_sends_two_numbers_per_token() -> None:
    run_ranks(2, two_numbers_per_token)


def two_numbers_per_token() -> None:
    model = split(make_llama())
    head, targets = model.get_output_embeddings(), torch.arange(23)
    hidden = torch.randn(23, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with count_collectives() as parts:
        head_loss(head, hidden, targets, LogitRule()).backward()
    assert dict(parts.num_bytes) == {"all_gather": 2 * 2 * 4 * 23, "all_reduce": 4 * 23 * 32}
    with count_collectives() as joined:
        reference(head, hidden, targets, LogitRule()).backward()
    assert dict(joined.num_bytes) == {"all_gather": 4 * 23 * VOCABULARY, "all_reduce": 4 * 23 * 32}
    with pytest.raises(ValueError, match="needs the whole head"):
        head_loss(head, hidden, targets, LogitRule(), liger=True)


def test_a_look_up_is_exact_and_fails_on_all_ranks() -> None:
    run_ranks(2, look_up)


def look_up() -> None:
    config = {"pad_token_id": 40}
    theirs, ours = make_llama(**config).to(torch.bfloat16), split(make_llama(**config).to(torch.bfloat16))
    ids = torch.arange(VOCABULARY).flip(0)[None]
    assert torch.equal(theirs.get_input_embeddings()(ids), ours.get_input_embeddings()(ids))
    for wrong in (-1, VOCABULARY, VOCABULARY + 40):
        with pytest.raises(IndexError):
            ours(input_ids=torch.tensor([[3, wrong]]))
    assert ours.get_input_embeddings().padding_idx == 40
    with torch.no_grad():  # nothing is left over from what failed
        assert torch.allclose(theirs(ids).logits, ours(ids).logits, rtol=0.05, atol=0.02)


def test_a_vocabulary_that_does_not_divide_stays_whole_and_says_so() -> None:
    assert run_ranks(2, stays_whole) == [1, 0]


def stays_whole() -> int:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_shard.parallelize.tensor").addHandler(handler)
    model = split(make_llama(vocab_size=65))
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        assert layer.weight.placements == (Replicate(),)
    assert split_head(model.get_output_embeddings()) is None
    assert model.model.layers[0].mlp.up_proj.weight.placements == (Shard(0),)
    ids = torch.arange(65)[None]
    torch.testing.assert_close(model(ids).logits, make_llama(vocab_size=65)(ids).logits, rtol=1e-5, atol=1e-5)
    assert all(
        "tp=2 does not divide the vocabulary of LlamaForCausalLM: embedding and head stay whole" in s for s in said
    )
    return len(said)
