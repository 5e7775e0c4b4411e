"""The step of litgpt's own finetuning script, for simulating published runs with the code that ran.

litgpt is no dependency of the benchmarks: where it cannot be imported, its rows are left out of this comparison.
"""

import importlib.util
import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from lightning.fabric.plugins import HalfPrecision
from torch import Tensor, nn

from benchmarks.results import HERE
from lightning_shard import Plan, TrainSpec
from lightning_shard.simulate import simulate
from lightning_shard.simulate.result import Simulation

MISSING = "litgpt is not installed (pip install --no-deps litgpt)"
HEAD_CHUNK = 128
"""Tokens per chunk of the head in litgpt's finetuning scripts."""


@dataclass(frozen=True, kw_only=True)
class LitgptJob:
    """A published run of litgpt, as its configuration file tells it."""

    name: str
    """Of a model in litgpt's table."""
    seq_len: int
    micro_batch_size: int
    accumulate: int
    precision: str = "bf16-true"
    lora: dict[str, Any] | None = None
    """Fields of litgpt's LoRA configuration; None trains the whole model."""


def jobs() -> dict[str, LitgptJob]:
    """The published runs of litgpt on one GPU, by the row's id."""
    return {row.pop("id"): LitgptJob(**row) for row in json.loads((HERE / "published_litgpt.json").read_text())}


def litgpt_version() -> str | None:
    """The version that would run; None where litgpt is not installed."""
    return metadata.version("litgpt") if importlib.util.find_spec("litgpt") else None


def simulated(job: LitgptJob) -> Simulation:
    """One step of litgpt's model, adapters and loss on one device, as Fabric runs it there."""
    train = TrainSpec(
        seq_len=job.seq_len,
        micro_batch_size=job.micro_batch_size,
        accumulate=job.accumulate,
        precision=job.precision,
        master_dtype="bfloat16" if job.precision == "bf16-true" else None,
    )
    return simulate(lambda: LitgptStep(job), train, Plan())


class LitgptStep(nn.Module):
    """litgpt's model with its script's training step.

    Fabric's plugin for ``bf16-true`` stores weights and rotary tables in bfloat16, makes tensors of that type in forward
    and hands FP32 logits back; all of that is the plugin's own code here.
    """

    def __init__(self, job: LitgptJob) -> None:
        super().__init__()
        self._plugin = HalfPrecision("bf16-true") if job.precision == "bf16-true" else None
        self._logits: list[Tensor] = []
        with self._narrow():
            self.gpt = _model(job)

    def _narrow(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._plugin is None else self._plugin.tensor_init_context()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The loss of token ids (rows, tokens), their own labels."""
        from litgpt.utils import chunked_cross_entropy

        self._logits = []  # the batch before the longest one is shorter: what is left of it is not counted
        logits = self._logits = self._wide(self._forward(batch))  # the script's variable lives through backward
        logits[-1] = logits[-1][..., :-1, :]
        loss: Tensor = chunked_cross_entropy(logits, batch[..., 1:])
        return loss

    def _forward(self, batch: Tensor) -> list[Tensor]:
        with self._narrow():
            logits: list[Tensor] = self.gpt(batch, lm_head_chunk_size=HEAD_CHUNK)
        return logits

    def _wide(self, logits: list[Tensor]) -> list[Tensor]:
        """What Fabric returns to the script under every precision: FP32."""
        if self._plugin is not None:
            return list(self._plugin.convert_output(logits))
        return [each.float() for each in logits]


def _model(job: LitgptJob) -> nn.Module:
    import litgpt.lora

    if job.lora is None:
        model: Any = litgpt.GPT.from_name(job.name)
    else:
        model = litgpt.lora.GPT.from_name(job.name, **job.lora)
        litgpt.lora.mark_only_lora_as_trainable(model)
    model.max_seq_length = job.seq_len
    return model
