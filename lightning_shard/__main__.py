"""``python -m lightning_shard`` is the command ``lightning-shard``."""

import sys

from lightning_shard.cli import main

if __name__ == "__main__":
    sys.exit(main())
