"""Lightning strategies that obey a Plan."""

from lightning_shard.strategies.auto import AutoShardStrategy
from lightning_shard.strategies.ddp import TunedDDPStrategy
from lightning_shard.strategies.fsdp2 import FSDP2Strategy

__all__ = ["AutoShardStrategy", "FSDP2Strategy", "TunedDDPStrategy"]
