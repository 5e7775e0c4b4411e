"""The rank server: imports the heavy packages once, then forks fresh rank processes for every job.

A fork of a process that has torch, Lightning and transformers loaded takes some 10 ms where importing
them takes 5-20 s, and every test still starts from untouched global state. Forking is safe here because
the server itself never computes: it holds no threads, no autograd state and no CUDA context.
Started by :mod:`lightning_shard.testing.pool` as ``python -m lightning_shard.testing.server FD``.
"""

import contextlib
import gc
import importlib
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from lightning_shard.testing.job import Job, Report
from lightning_shard.testing.rank import import_body, run_rank

PRELOADED = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "lightning.pytorch.demos.boring_classes",
    "transformers.models.llama.modeling_llama",
    "peft.utils.transformers_weight_conversion",
    "lightning_shard.doctor.model",
    "lightning_shard.strategies",
)
GRACE_S = 1.0
"""How long the other ranks may still write down their own failure after the first one."""
POLL_S = 0.005


def main() -> None:
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    if "--rewrite-asserts" in sys.argv:
        _rewrite_asserts()
    _preload()
    with contextlib.suppress(EOFError):  # the caller is gone
        while True:
            connection.send(_supervise(connection.recv(), connection))


def _preload() -> None:
    for name in PRELOADED:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    import torch

    torch.compiler.reset()  # loads Dynamo, which every optimizer step asks for
    _fill_caches()
    gc.freeze()  # a collection in a rank would copy every page it looks at


def _fill_caches() -> None:
    """Work out what every rank would work out again: for an adapter, peft asks transformers for its 900 patterns of
    renamed weights (transformers 5), a third of the processor time of a short run of adapters.
    """
    with contextlib.suppress(ImportError):
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("llama")


def _rewrite_asserts() -> None:
    """Have pytest explain the plain asserts of test modules in the ranks too, as it does in its own process."""
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    install_importhook(get_config())


def _supervise(job: Job, connection: "Connection[Any, Any]") -> Report:
    sys.path[:] = job.search_path
    with contextlib.suppress(Exception):  # so that the ranks need not; a failing import is theirs to report
        import_body(job)
    running = {_fork(job, rank, connection): rank for rank in range(job.num_ranks)}
    deadline, timed_out = time.monotonic() + job.timeout_s, False
    first_failed, exit_code = None, 0
    while running:
        for rank, code in _reap(running):
            if code and first_failed is None and not timed_out:
                first_failed, exit_code = rank, code
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if running and time.monotonic() > deadline:
            timed_out = first_failed is None
            _stop(running, with_stacks=timed_out)
            deadline = float("inf")
        if connection.poll(POLL_S):  # nothing is sent while a job runs: the caller is gone
            _stop(running, with_stacks=False)
            raise EOFError
    return Report(timed_out=timed_out, first_failed=first_failed, exit_code=exit_code)


def _reap(running: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Take the processes that have ended out of ``running``; their ranks and exit codes."""
    for pid in list(running):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            yield running.pop(pid), os.waitstatus_to_exitcode(status)


def _fork(job: Job, rank: int, connection: "Connection[Any, Any]") -> int:
    pid = os.fork()
    if pid == 0:
        try:
            connection.close()
            run_rank(job, rank)
        finally:
            os._exit(1)
    return pid


def _stop(pids: Iterable[int], *, with_stacks: bool) -> None:
    if with_stacks:
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)  # faulthandler's, see rank.py
        time.sleep(1)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
