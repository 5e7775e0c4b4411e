"""A loss that counts tokens, not ranks or micro-batches."""

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_shard._compat.trainer import num_data_ranks


class TokenMeanLoss(LightningModule):
    """A LightningModule whose optimizer step follows the mean loss over all label tokens of the step.

    Averaging per micro-batch and then over ranks lets a short answer count more than a long one, and makes
    the result depend on the number of devices. Here the gradient of one optimizer step is

        sum of token losses, over all ranks and all accumulated micro-batches
        ----------------------------------------------------------------------
                 number of label tokens, over the same

    for any number of ranks and any accumulation, the shorter last window of an epoch included. Call
    :meth:`train_on` at the end of ``training_step`` and return what it gives; call :meth:`validate_on` in
    ``validation_step``. Both ``train_loss`` and ``val_loss`` are logged token-exact.

    How: the returned value is the token *sum* times the two divisors that follow it (the strategy's mean over
    data-parallel ranks, Lightning's division by ``accumulate_grad_batches``), and the finished gradients are
    divided by the true count in ``on_before_optimizer_step``, before Lightning clips. One all-reduce of two
    numbers per optimizer step. It holds for every strategy that averages gradients over its data-parallel
    ranks (DDP, FSDP2 and all of ours). Callbacks' ``on_before_optimizer_step`` runs before the module's, so
    they see gradients that are not yet divided. A subclass that overrides a hook below calls ``super()``.
    """

    def __init__(self) -> None:
        super().__init__()
        self._window: Tensor | None = None
        self._validated: Tensor | None = None

    def train_on(self, loss_sum: Tensor, num_tokens: Tensor | int) -> Tensor:
        """What ``training_step`` returns for a micro-batch.

        Args:
            loss_sum: the sum, not the mean, of the losses of this rank's label tokens.
            num_tokens: how many they are.
        """
        self._window = _add(self._window, loss_sum, num_tokens)
        accumulated = self.trainer.accumulate_grad_batches if self.automatic_optimization else 1
        return loss_sum * (num_data_ranks(self.trainer) * accumulated)

    def validate_on(self, loss_sum: Tensor, num_tokens: Tensor | int) -> None:
        """Count a validation batch in; see :meth:`train_on` for the arguments."""
        self._validated = _add(self._validated, loss_sum, num_tokens)

    @override
    def on_train_start(self) -> None:
        self._window = None  # of a run that an exception ended in the middle of a window

    @override
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        if self._window is None:
            return
        loss_sum, num_tokens = self._over_ranks(self._window)
        self._window = None
        scale = 1 / num_tokens.clamp(min=1)
        for gradient in _gradients(optimizer):
            gradient.mul_(scale)
        self.log("train_loss", loss_sum * scale, prog_bar=True)

    @override
    def on_validation_epoch_start(self) -> None:
        self._validated = None

    @override
    def on_validation_epoch_end(self) -> None:
        if self._validated is not None:
            loss_sum, num_tokens = self._over_ranks(self._validated)
            self.log("val_loss", loss_sum / num_tokens.clamp(min=1), prog_bar=True, sync_dist=True)

    def _over_ranks(self, local: Tensor) -> Tensor:
        total = self.trainer.strategy.reduce(local, reduce_op="sum")
        assert isinstance(total, Tensor)
        # Ranks that share one batch (tensor parallel) have each counted it.
        return total * (num_data_ranks(self.trainer) / self.trainer.world_size)


def _add(total: Tensor | None, loss_sum: Tensor, num_tokens: Tensor | int) -> Tensor:
    """Two running FP32 numbers, loss sum and count, kept on the device: no synchronisation per micro-batch."""
    loss = loss_sum.detach().float()
    pair = torch.stack([loss, torch.as_tensor(num_tokens, device=loss.device, dtype=loss.dtype)])
    return pair if total is None else total + pair


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    """This rank's part of each gradient."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
