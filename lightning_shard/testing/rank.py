"""What one rank does: take on its identity, join the process group, call the body, write down what came of it."""

import faulthandler
import importlib
import importlib.util
import os
import pickle
import pickletools
import random
import signal
import sys
import time
import traceback
import unittest
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from lightning_shard.testing.job import Failure, Job
from lightning_shard.testing.pool import INSIDE

MAIN = "__rank_main__"


def run_rank(job: Job, rank: int) -> NoReturn:
    """Run the job's body as ``rank``, in a process of its own, and end that process."""
    code = 1
    try:
        _become(job, rank)
        _join(job, rank)
        result = _call(job)
        job.result_file(rank).write_bytes(_pickled_result(result))
        _leave()
        code = 0
    except BaseException as error:  # whatever it is, the caller must hear of it
        _write_failure(job, rank, error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def import_body(job: Job) -> Callable[..., Any]:
    """The function a job names, without the decorator that sent it here."""
    if "__main__" in (job.module, *_modules_named(job.arguments)):
        # Under another name, so that it does not take itself for the script that was started.
        sys.modules["__main__"] = sys.modules.get(MAIN) or _load_file(MAIN, job.main_file)
    target: Any = _import_module(job.module, job.source)
    for name in job.qualname.split("."):
        target = getattr(target, name)
    body: Callable[..., Any] = getattr(target, "rank_body", target)
    return body


def _modules_named(pickled: bytes) -> set[str]:
    """The strings in a pickle, the names of the modules it refers to among them."""
    return {argument for _, argument, _ in pickletools.genops(pickled) if isinstance(argument, str)}


def _import_module(name: str, source: str | None) -> ModuleType:
    module = sys.modules.get(name)
    if module is None and importlib.util.find_spec(name) is not None:
        module = importlib.import_module(name)
    if module is None or (source and Path(str(module.__file__)).resolve() != Path(source).resolve()):
        module = _load_file(name, source)
    return module


def _load_file(name: str, source: str | None) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, source) if source else None
    if spec is None or spec.loader is None:
        raise ImportError(f"The ranks cannot import {name!r} (file: {source}). Keep the body in an importable file.")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _become(job: Job, rank: int) -> None:
    output = os.open(job.output_file(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=job.stacks_file(rank).open("w"), all_threads=True)
    os.chdir(job.working_directory)
    os.environ.clear()
    os.environ.update(job.environment)
    os.environ.update(_torchrun_variables(job, rank))
    random.seed(0)  # Python reseeds it at every fork


def _torchrun_variables(job: Job, rank: int) -> dict[str, str]:
    """What torchrun would have set: Lightning then joins the ranks that are there and launches none."""
    return {
        INSIDE: str(rank),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(job.num_ranks),
        "LOCAL_WORLD_SIZE": str(job.num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",  # never opened: the ranks meet in a file
        "TORCHELASTIC_RUN_ID": "lightning-shard-testing",
    }


def _join(job: Job, rank: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    meeting_point = f"file://{job.folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=meeting_point, rank=rank, world_size=job.num_ranks)
    dist.barrier()  # a body that ends at once would break connections still being made


def _call(job: Job) -> Any:
    body = import_body(job)
    args, kwargs = pickle.loads(job.arguments)
    return body(*args, **kwargs)


def _leave() -> None:
    """Wait for the other ranks, so that none loses a peer it is still talking to."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _pickled_result(result: Any) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise TypeError(
            f"The body returned a {type(result).__name__}, which cannot be pickled ({error}). "
            "Return plain values or full tensors."
        ) from error


def _write_failure(job: Job, rank: int, error: BaseException) -> None:
    at_s = time.monotonic()
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
    is_skip = isinstance(error, unittest.SkipTest) or type(error).__name__ == "Skipped"  # the latter is pytest's
    failure = Failure(
        rank=rank,
        at_s=at_s,
        traceback=text,
        error=_pickled_error(error),
        skipped=str(error) if is_skip else None,
    )
    unfinished = job.failure_file(rank).with_suffix(".part")
    unfinished.write_bytes(pickle.dumps(failure))
    unfinished.rename(job.failure_file(rank))


def _pickled_error(error: BaseException) -> bytes | None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)  # an exception with its own __init__ may pickle and not come back
    except Exception:
        return None
    return data
