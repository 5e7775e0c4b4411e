"""What a run did, as a page with pictures that opens without a network."""

from lightning_shard.report.write import write_report

__all__ = ["write_report"]
