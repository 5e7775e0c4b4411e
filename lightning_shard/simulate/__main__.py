"""The process behind :func:`~lightning_shard.simulate.apart.simulate_in_subprocess`."""

import pickle
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:] = pickle.loads(sys.stdin.buffer.read())
    from lightning_shard.simulate.apart import answer_task

    answer_task(Path(sys.argv[1]), Path(sys.argv[2]))
