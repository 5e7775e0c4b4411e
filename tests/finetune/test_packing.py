"""Packed rows: full, and of the same loss, token by token, as the examples alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import make_model_folder, write_pairs
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, MambaConfig, MistralConfig, Qwen3Config

from lightning_shard.finetune import CausalLM, InstructionData
from lightning_shard.finetune.batches import collate, make_split
from lightning_shard.finetune.encode import IGNORED, Example
from lightning_shard.finetune.packing import pack, require_packable

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "pad_token_id": 0,
    "head_dim": 8,
}
CONFIGS: dict[str, Any] = {
    "qwen3": Qwen3Config(**SIZES),
    "sliding": MistralConfig(**SIZES, sliding_window=6),
    "gemma3": Gemma3TextConfig(**SIZES, sliding_window=6, layer_types=["sliding_attention", "full_attention"]),
    "learned-positions": GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=300),
}


def test_longest_first_into_the_fullest_row_that_has_room() -> None:
    assert pack([3, 5, 2, 8, 7, 3], 10) == [[2, 3], [0, 4], [1, 5]]
    assert pack([10, 10], 10) == [[0], [1]]


def test_every_example_is_in_one_row_and_no_row_is_too_long() -> None:
    lengths = torch.randint(1, 100, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    rows = pack(lengths, 100)
    assert sorted(index for row in rows for index in row) == list(range(500))
    assert max(sum(lengths[i] for i in row) for row in rows) <= 100
    assert len(rows) <= 1.03 * sum(lengths) / 100 + 1


def test_a_packed_row_made_by_hand() -> None:
    one, two = Example([1, 2, 3], [IGNORED, 2, 3]), Example([4, 5], [4, 5])
    batch = collate([(one, two)], pad_id=0, multiple=8, longest=8, packed=True)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 0, 0, 0]]
    assert batch["labels"].tolist() == [[IGNORED, 2, 3, IGNORED, 5, IGNORED, IGNORED, IGNORED]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]


def token_losses(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=batch["input_ids"], position_ids=batch.get("position_ids"), use_cache=False).logits
    targets = batch["labels"][:, 1:]
    learned = targets != IGNORED
    return functional.cross_entropy(logits[:, :-1][learned], targets[learned], reduction="none")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_token_losses_equal_those_of_the_examples_alone(name: str, attention: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=attention).eval()
    require_packable(model)
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 17, 9, 3, 12, 8]
    examples = [
        Example(ids, ids) for n in lengths for ids in [torch.randint(1, 300, (n,), generator=generator).tolist()]
    ]
    split = make_split(examples, 24, "data", packing=True)
    assert len(split.items) == 3
    packed = collate(split.items, pad_id=0, multiple=8, longest=24, packed=True)
    together = token_losses(model, packed)
    alone = [token_losses(model, collate([(e,)], pad_id=0, multiple=1, longest=24)) for row in split.items for e in row]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-5, atol=1e-6)


def test_without_new_positions_the_losses_would_differ() -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3"]).eval()
    examples = [Example(list(range(1, 9)), list(range(1, 9))), Example(list(range(20, 28)), list(range(20, 28)))]
    batch = collate([tuple(examples)], pad_id=0, multiple=8, longest=16, packed=True)
    kept_apart = token_losses(model, batch)
    del batch["position_ids"]
    assert not torch.allclose(kept_apart, token_losses(model, batch))


def test_a_model_that_carries_state_over_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=300))
    with pytest.raises(ValueError, match=r"MambaForCausalLM has layers of the kind linear_attention.*packing: false"):
        require_packable(model)


def loss(folder: Path, *, packing: bool) -> float:
    data = InstructionData(
        str(folder / "model"), str(folder / "rows.jsonl"), max_seq_len=64, packing=packing, micro_batch_size=3
    )
    data.setup("fit")
    module = CausalLM(str(folder / "model"))
    module.model = AutoModelForCausalLM.from_pretrained(folder / "model")
    module._rule = module._logit_rule(module.model)
    sums = [module.loss_of(batch) for batch in data.train_dataloader()]
    assert sum(int(count) for _, count in sums) == data.splits["train"].num_label_tokens
    return sum(one.item() for one, _ in sums)


def test_an_epoch_has_the_same_loss_packed_and_not(tmp_path: Path) -> None:
    make_model_folder(tmp_path / "model")
    write_pairs(tmp_path / "rows.jsonl", 20)
    assert loss(tmp_path, packing=True) == pytest.approx(loss(tmp_path, packing=False), rel=1e-5)
