"""What a module and its data settle with the Trainer: micro-batch, number of steps, and where a resumed run goes on."""

import logging
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Trainer

from lightning_shard.parallelize.together import gather

if TYPE_CHECKING:
    from lightning_shard.finetune.model import CausalLM
    from lightning_shard.hardware import Cluster
    from lightning_shard.specs import TrainSpec

log = logging.getLogger(__name__)


def num_steps(trainer: Trainer) -> int:
    """Optimizer steps of the run; of a stream ``max_steps`` alone says it.

    Raises:
        ValueError: for a stream without ``max_steps``.
    """
    if not getattr(getattr(trainer, "datamodule", None), "streaming", False):
        return int(trainer.estimated_stepping_batches)
    if trainer.max_steps < 1:
        raise ValueError("data.streaming reads without knowing the end. Say how long to train: trainer.max_steps.")
    return trainer.max_steps


def go_on(trainer: Trainer) -> None:
    """Where the number of ranks changed since the checkpoint, count the epoch's batches as this run cuts them.

    Lightning restores the number of micro-batches of one rank; whole optimizer steps are what both runs share.
    """
    data: Any = getattr(trainer, "datamodule", None)
    before: int = getattr(data, "restored", {}).get("accumulate", 0)
    if not before:
        return
    current: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    ready, here = current.ready, recut(trainer, before)
    for name in ("ready", "started", "processed", "completed"):
        behind = ready - getattr(current, name)  # the batch at whose end the checkpoint was written
        setattr(current, name, here - behind)
    data.restored = {}


def recut(trainer: Trainer, before: int) -> int:
    """This run's micro-batches for those of the epoch that are done, when ``before`` of them made an optimizer step.

    Steps are whole, except for the last one of an epoch, which may be shorter. At the end of an epoch that has no known
    length the next one starts: Lightning, which knows no length either, would go on counting.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    steps, rest = divmod(progress.current.ready, before)
    if not progress.is_last_batch:
        return steps * trainer.accumulate_grad_batches
    total = trainer.num_training_batches
    return 0 if total == float("inf") else int(min((steps + (rest > 0)) * trainer.accumulate_grad_batches, total))


def choose_batch(module: "CausalLM") -> None:
    """Settle the micro-batch of data that leave it open: rank 0 predicts which is fastest, and tells the others."""
    trainer = module.trainer
    data: Any = getattr(trainer, "datamodule", None)
    if data is None or getattr(data, "micro_batch_size", 1) is not None:
        return
    rows = data.rows_per_step()
    if rows is None:
        raise ValueError(
            "data.micro_batch_size is left to the planner, which needs to know what an optimizer step holds. Give "
            "data.global_batch_size or data.global_batch_tokens, or a micro_batch_size."
        )
    cluster = _cluster(trainer)
    answer: int | Exception = 1
    if trainer.is_global_zero:
        try:
            answer = _fastest(module, data, cluster, rows)
        except Exception as error:  # told to every rank, which all stop
            answer = error
    answer = trainer.strategy.broadcast(answer)
    if isinstance(answer, Exception):
        raise answer
    data.micro_batch_size = answer


def _fastest(module: "CausalLM", data: Any, cluster: "Cluster", rows: int) -> int:
    from lightning_shard.finetune.batching import choose_micro_batch
    from lightning_shard.specs import ModelSpec

    assert module.model is not None
    strategy = module.trainer.strategy
    size, decision = choose_micro_batch(
        ModelSpec.from_module(module.model),
        _wish(module, data.max_seq_len),
        cluster,
        rows,
        headroom=getattr(strategy, "headroom", 0.1),
        pin=_pin(strategy),
    )
    log.info(
        "Micro-batch of %d rows: %.3g s predicted for an optimizer step of %d rows.",
        size,
        decision.estimate.step_s,
        rows,
    )
    return size


def _wish(module: "CausalLM", max_seq_len: int) -> "TrainSpec":
    from lightning_shard.specs import TrainSpec

    return TrainSpec(
        seq_len=max_seq_len,
        precision=str(module.trainer.precision),
        optimizer="adamw",
        optimizer_implementation="fused" if module.fused else "foreach",
        loss=module.planned_loss,  # type: ignore[arg-type]
        gradients_cleared="before_backward",
    )


def _cluster(trainer: Trainer) -> "Cluster":
    """What there is to run on, from the smallest device of all ranks. Collective."""
    from lightning_shard.strategies.auto import AutoShardStrategy
    from lightning_shard.strategies.facts import describe_cluster, free_device_memory

    strategy: Any = trainer.strategy
    if isinstance(strategy, AutoShardStrategy):
        return strategy.cluster()
    local = trainer.num_devices
    memory = free_device_memory(strategy.root_device, local)
    return describe_cluster(strategy.root_device, trainer.num_nodes, local, min(gather(memory)))


def _pin(strategy: Any) -> dict[str, Any]:
    """What of the plan is settled already."""
    from lightning_shard.strategies.auto import AutoShardStrategy
    from lightning_shard.strategies.fsdp2 import FSDP2Strategy

    if isinstance(strategy, AutoShardStrategy) and strategy.fixed_plan() is None:
        return strategy.pin
    plan = strategy.fixed_plan() if hasattr(strategy, "fixed_plan") else None
    if plan is not None:
        return {"dp_replicate": plan.dp_replicate, "dp_shard": plan.dp_shard, "tp": plan.tp}
    return {} if isinstance(strategy, FSDP2Strategy) else {"dp_shard": 1}  # others hold a whole copy each
