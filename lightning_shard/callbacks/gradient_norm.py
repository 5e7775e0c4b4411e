"""The norm of all gradients of the step that has just ended."""

from torch.distributed.tensor import DTensor

from lightning_shard._compat import DDPStrategy, LightningModule, Trainer
from lightning_shard.parallelize.clipping import total_norm


def gradient_norm(trainer: Trainer, module: LightningModule) -> float | None:
    """The 2-norm before clipping, over plain and sharded gradients alike. A collective where gradients are sharded.

    None where it cannot be known: no gradients left, gradients clipped by a strategy that does not keep the norm, or
    a strategy that shards gradients in a way of its own.
    """
    norm = getattr(trainer.precision_plugin, "last_norm", None)
    if norm is not None:
        return float(norm)
    if trainer.gradient_clip_val or not (trainer.world_size == 1 or isinstance(trainer.strategy, DDPStrategy)):
        return None
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    if not gradients or any(isinstance(gradient, DTensor) and gradient.is_meta for gradient in gradients):
        return None
    return float(total_norm(gradients))
