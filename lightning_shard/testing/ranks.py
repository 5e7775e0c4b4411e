"""Run a function on several CPU ranks, as an ordinary call or as an ordinary test."""

import functools
import inspect
import os
import pickle
import sys
import tempfile
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from lightning_shard.testing.job import Failure, Job
from lightning_shard.testing.pool import rank_server

P = ParamSpec("P")
R = TypeVar("R")

TIMEOUT_S = 120.0
OUTPUT_LINES = 30
"""Lines of a rank's output that an error repeats."""


class RankError(RuntimeError):
    """A rank failed; the message holds its traceback."""

    def __init__(self, message: str, *, rank: int | None = None, error: BaseException | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        """The first rank that failed."""
        self.error = error
        """The exception it raised, where it could be brought over."""


def ranks(num_ranks: int, *, timeout_s: float = TIMEOUT_S) -> Callable[[Callable[P, object]], Callable[P, None]]:
    """Run the body of a test on every one of ``num_ranks`` gloo ranks, inside an initialised process group.

    ``parametrize`` and fixtures work as ever: their values are pickled and given to each rank. The first
    failing rank's traceback is the test's error. A Lightning ``Trainer(accelerator="cpu",
    devices=num_ranks)`` inside the body joins the ranks that are there.
    """

    def decorate(body: Callable[P, object]) -> Callable[P, None]:
        @functools.wraps(body)
        def test(*args: P.args, **kwargs: P.kwargs) -> None:
            _run(num_ranks, body, args, kwargs, timeout_s)

        test.rank_body = body  # type: ignore[attr-defined]
        return test

    return decorate


def run_ranks(
    num_ranks: int, body: Callable[..., R], *args: Any, timeout_s: float = TIMEOUT_S, **kwargs: Any
) -> list[R]:
    """What ``body(*args, **kwargs)`` returns on each of ``num_ranks`` gloo ranks.

    The body must be importable (a function of a module or a method of its classes) and its arguments and
    result picklable.

    Raises:
        RankError: with the first failing rank's traceback, or every rank's stack after a time-out.
        ValueError: when the body cannot be imported by the ranks.
        TypeError: when an argument cannot be pickled.
    """
    return _run(num_ranks, body, args, kwargs, timeout_s)


def _run(
    num_ranks: int, body: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
) -> list[R]:
    if num_ranks < 1:
        raise ValueError(f"num_ranks={num_ranks} must be 1 or more.")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = Job(
            num_ranks=num_ranks,
            module=body.__module__,
            source=_source_file(body.__module__),
            main_file=_source_file("__main__"),
            qualname=_importable_name(body),
            arguments=_pickled_arguments(body, args, kwargs),
            timeout_s=timeout_s,
            folder=Path(folder),
            working_directory=os.getcwd(),
            environment=dict(os.environ) | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            search_path=list(sys.path),
        )
        report = rank_server().run(job)
        _replay_output(job)
        if report.timed_out:
            raise RankError(_timeout_message(job))
        if report.first_failed is not None:
            _raise_failure(job, report.first_failed, report.exit_code)
        return [pickle.loads(job.result_file(rank).read_bytes()) for rank in range(num_ranks)]


def _importable_name(body: Callable[..., object]) -> str:
    name: str = body.__qualname__
    if "<" in name:
        raise ValueError(
            f"{name} cannot run on ranks: they import the body by name, and a lambda or a function inside a function "
            "has none. Move it to the top of its module."
        )
    return name


def _source_file(module: str) -> str | None:
    return getattr(sys.modules.get(module), "__file__", None)


def _pickled_arguments(body: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    named = inspect.signature(body).bind(*args, **kwargs).arguments
    for name, value in named.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            raise TypeError(
                f"The argument {name!r} of {body.__qualname__} (a {type(value).__name__}) cannot travel to the ranks: "
                f"{error}. Only picklable values can; make this one inside the body."
            ) from error
    return pickle.dumps((args, kwargs))


def _replay_output(job: Job) -> None:
    for rank in range(job.num_ranks):
        text = _read(job.output_file(rank))
        if text:
            sys.stdout.write(f"--- rank {rank} ---\n{text}")


def _timeout_message(job: Job) -> str:
    stacks = "\n\n".join(
        f"rank {rank}:\n{_read(job.stacks_file(rank)) or '(finished)'}" for rank in range(job.num_ranks)
    )
    return f"{job.qualname} did not finish on {job.num_ranks} ranks within {job.timeout_s:g} s. Stacks:\n\n{stacks}"


def _raise_failure(job: Job, rank: int, exit_code: int) -> None:
    if _load_failure(job, rank) is None:  # it died without a word
        ended = f"was ended by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
        raise RankError(f"rank {rank} of {job.num_ranks} {ended}.{_output_tail(job, rank)}", rank=rank)
    failures = filter(None, (_load_failure(job, rank) for rank in range(job.num_ranks)))
    first = min(failures, key=lambda failure: failure.at_s)
    if first.skipped is not None:
        raise unittest.SkipTest(first.skipped)
    error = pickle.loads(first.error) if first.error is not None else None
    message = f"rank {first.rank} of {job.num_ranks} failed:\n\n{first.traceback}{_output_tail(job, first.rank)}"
    raise RankError(message, rank=first.rank, error=error)


def _load_failure(job: Job, rank: int) -> Failure | None:
    file = job.failure_file(rank)
    if not file.exists():
        return None
    failure: Failure = pickle.loads(file.read_bytes())
    return failure


def _output_tail(job: Job, rank: int) -> str:
    lines = _read(job.output_file(rank)).splitlines()[-OUTPUT_LINES:]
    return "\nIts last output:\n" + "\n".join(lines) if lines else ""


def _read(file: Path) -> str:
    return file.read_text(errors="replace") if file.exists() else ""
