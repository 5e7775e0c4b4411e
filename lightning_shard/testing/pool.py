"""The caller's side of the rank server: one server per process, started at first use."""

import atexit
import os
import signal
import subprocess
import sys
import tempfile
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lightning_shard.testing.job import Job, Report

STARTUP_S = 180.0
"""How long the server may take to import what it preloads on a busy machine."""


INSIDE = "LIGHTNING_SHARD_RANK"
"""Set in the environment of the server and its ranks."""


class RankServer:
    """A server process that forks ranks on request."""

    def __init__(self) -> None:
        self._log = tempfile.NamedTemporaryFile(prefix="rank-server-", suffix=".log")  # noqa: SIM115 - lives with us
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", "lightning_shard.testing.server", str(theirs.fileno())]
        if "pytest" in sys.modules:
            command.append("--rewrite-asserts")
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env=_server_environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        theirs.close()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def run(self, job: Job) -> Report:
        """Run a job to its end.

        Raises:
            RuntimeError: when the server itself ends or does not answer.
        """
        connection: Connection[Any, Any] = self._connection
        try:
            connection.send(job)
            if not connection.poll(job.timeout_s + STARTUP_S):
                raise EOFError
            report: Report = connection.recv()
        except (EOFError, OSError):
            self.stop()
            raise RuntimeError(f"The rank server ended before its job did. Its log:\n{self._read_log()}") from None
        except BaseException:  # an interrupt: the ranks must not outlive it
            self.stop()
            raise
        return report

    def stop(self) -> None:
        """End the server and every rank it started."""
        if self.running:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._connection.close()

    def _read_log(self) -> str:
        return Path(self._log.name).read_text()


def _server_environment() -> dict[str, str]:
    single_threaded = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}  # a CUDA context does not survive a fork, and gloo ranks need none
    return {
        **os.environ,
        **single_threaded,
        **no_gpu,
        INSIDE: "server",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


_server: RankServer | None = None


def rank_server() -> RankServer:
    """This process's server, started if there is none.

    Raises:
        RuntimeError: in a rank, or in the server.
    """
    global _server
    if INSIDE in os.environ:
        raise RuntimeError(
            "Ranks cannot start ranks. A script that runs ranks when it is imported does so in them as well: put "
            "its calls below `if __name__ == '__main__':`."
        )
    if _server is None or not _server.running:
        _server = RankServer()
        atexit.register(_server.stop)
    return _server
