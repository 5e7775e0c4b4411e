"""The trained model as a folder that plain peft or transformers opens."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_shard.checkpoint.adapter_folder import gathered, name_plainly
from lightning_shard.checkpoint.atomic import whole_folder
from lightning_shard.parallelize.together import on_all_ranks


def save(model: Any, folder: Path, processor: Any, *, writes: bool, labels: Sequence[str] = ()) -> None:
    """Write a PEFT adapter folder, or, of a model without adapters, a whole Hugging Face folder.

    Collective: every rank calls it, the one with ``writes`` writes. Of a sharded model one parameter at a
    time is gathered, and with adapters only what trained: never the frozen base.

    Args:
        model: a ``PeftModel`` or a ``PreTrainedModel``, sharded or not.
        folder: appears whole, replacing what was there.
        processor: the tokenizer or image processor, written beside a whole model; an adapter's base has its own.
        writes: whether this rank writes.
        labels: of a classifier, in the order of its logits: written as ``labels.json`` beside an adapter, whose base knows
            no such thing.
    """
    from peft import PeftModel

    adapters = isinstance(model, PeftModel)
    state = gathered(model, trained_only=adapters, keep=writes)

    def write() -> None:
        if writes:
            with whole_folder(folder) as fresh:
                model.save_pretrained(fresh, state_dict=state)
                if adapters:
                    name_plainly(fresh)
                    if labels:
                        (fresh / "labels.json").write_text(json.dumps(list(labels), ensure_ascii=False), "utf-8")
                else:
                    processor.save_pretrained(fresh)

    on_all_ranks(write)
