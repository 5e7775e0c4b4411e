"""Sample answers."""

from typing import Any

import torch

from lightning_shard.finetune.encode import render
from lightning_shard.finetune.rows import Message


@torch.no_grad()
def answer(model: Any, tokenizer: Any, messages: list[Message], max_new_tokens: int = 64) -> str:
    """The model's most likely next turn.

    Every rank calls it with the same messages: where the model is sharded each step is collective, and the
    same prompt leads all ranks through the same number of steps.
    """
    special = tokenizer.chat_template is None
    inputs = tokenizer(render(messages, tokenizer, answer_next=True), return_tensors="pt", add_special_tokens=special)
    training = model.training
    model.eval()
    ids = model.generate(
        input_ids=inputs["input_ids"].to(model.device),
        attention_mask=inputs["attention_mask"].to(model.device),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
    )
    model.train(training)
    return str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)).strip()
