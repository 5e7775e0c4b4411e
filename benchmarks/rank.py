"""One rank of a benchmark: joins the process group, calls the body, leaves its result."""

import os
import pickle
import sys
import warnings
from pathlib import Path


def main(folder: Path) -> None:
    """Run the task that ``launch`` left in the folder."""
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device, body, arguments = pickle.loads((folder / "task").read_bytes())
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    if world_size > 1:
        backend = "nccl" if device == "cuda" else "gloo"
        meeting_point = f"file://{folder / 'rendezvous'}"
        dist.init_process_group(backend, init_method=meeting_point, rank=rank, world_size=world_size)
    result = body(*arguments)
    part = folder / f"result-{rank}.part"
    part.write_bytes(pickle.dumps(result))
    part.rename(folder / f"result-{rank}")
    if world_size > 1:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # libraries' threads and exit hooks are not what is measured


if __name__ == "__main__":
    main(Path(sys.argv[1]))
