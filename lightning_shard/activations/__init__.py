"""What a block keeps for its backward, derived operation by operation (not the textbook's 34 h)."""

from lightning_shard.activations.block import BackwardPoint, BlockActivations, block_activations
from lightning_shard.activations.loss import LossActivations, loss_activations

__all__ = ["BackwardPoint", "BlockActivations", "LossActivations", "block_activations", "loss_activations"]
