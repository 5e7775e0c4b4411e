"""All ranks go on together or stop together."""

from lightning_shard.checkpoint.together import on_all_ranks

__all__ = ["on_all_ranks"]
