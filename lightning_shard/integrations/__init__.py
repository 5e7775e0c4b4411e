"""The same script under torchrun, SLURM, Kubernetes and Ray Train."""

from lightning_shard.integrations.elastic import KeepGlobalBatch
from lightning_shard.integrations.launched import launched
from lightning_shard.integrations.preemption import SaveOnPreemption

__all__ = ["KeepGlobalBatch", "SaveOnPreemption", "launched"]
