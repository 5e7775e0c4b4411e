"""Simulate in a process of its own, whose patches of torch nothing else can see."""

import io
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from lightning_shard.plans import Plan
from lightning_shard.simulate.result import Simulation
from lightning_shard.simulate.source import Source, copy_to_meta
from lightning_shard.specs import TrainSpec

TIMEOUT_S = 600.0


def simulate_in_subprocess(
    model: Source, train: TrainSpec, plan: Plan, *, timeout_s: float = TIMEOUT_S, **options: Any
) -> Simulation:
    """What :func:`~lightning_shard.simulate.api.simulate` returns, worked out in another process.

    Args:
        model: as there; a live module travels without its values. Its class must be importable: defined in a
            module, not in the script that runs.
        train: as there.
        plan: as there.
        timeout_s: after which the process is stopped.
        options: as there.

    Raises:
        ValueError: when the model cannot be sent, or as ``simulate`` raises it.
        RuntimeError: when the simulation failed, with its error.
    """
    source = copy_to_meta(model) if isinstance(model, nn.Module) else model
    with tempfile.TemporaryDirectory(prefix="simulate-") as folder:
        task, answer = Path(folder, "task"), Path(folder, "answer")
        task.write_bytes(_pickled((source, train, plan, options)))
        run = subprocess.run(
            [sys.executable, "-m", "lightning_shard.simulate", str(task), str(answer)],
            input=pickle.dumps(sys.path),
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
        if not answer.exists():
            raise RuntimeError(f"The simulation's process ended without an answer: {run.stderr.decode()[-2000:]}")
        result = pickle.loads(answer.read_bytes())
    if isinstance(result, Simulation):
        return result
    kind, message = result
    raise (ValueError if kind == "ValueError" else RuntimeError)(message)


def answer_task(task: Path, answer: Path) -> None:
    """The other side: simulate what ``task`` holds and leave the result, or the error, in ``answer``."""
    from lightning_shard.simulate.api import simulate

    result: object
    try:
        source, train, plan, options = pickle.loads(task.read_bytes())
        result = simulate(source, train, plan, **options)
    except Exception as error:  # whatever it is, the process that asked reports it
        result = (type(error).__name__, f"{error}")
    answer.write_bytes(pickle.dumps(result))


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    try:
        pickle.dump(value, buffer)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"The model cannot be sent to another process: {error}. Give a path, or a class or function defined at the "
            "top level of a module."
        ) from error
    if b"__main__" in buffer.getvalue():
        raise ValueError(
            "The model is defined in the script that runs, which another process cannot import. Move its class to a "
            "module of its own, or call simulate, which runs in this process."
        )
    return buffer.getvalue()
