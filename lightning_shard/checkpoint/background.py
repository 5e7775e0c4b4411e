"""Writing while training goes on."""

import threading
from collections.abc import Callable, Mapping

from torch import Tensor

from lightning_shard._compat.storage import copy_on_host


class Background:
    """Runs one save in a thread, and afterwards, if it went well, what had to wait for it.

    Args:
        job: the save; its collectives go over a group that nobody else uses meanwhile.
    """

    def __init__(self, job: Callable[[], None]) -> None:
        self._job = job
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._waiting: list[Callable[[], None]] = []
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)
        self._thread.start()

    def then(self, action: Callable[[], None]) -> None:
        """Run ``action`` after the save: in its thread, or here when it is over; not at all when it failed."""
        with self._lock:
            if not self._ended:
                self._waiting.append(action)
                return
        if self._error is None:
            action()

    def result(self) -> None:
        """Wait for the save, and raise what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def join(self, timeout_s: float) -> None:
        """Wait for so long and no longer, and raise nothing."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._job()
        except BaseException as error:  # whatever it is, the training thread must hear of it
            self._error = error
        with self._lock:
            self._ended = True
        try:
            for action in self._waiting if self._error is None else ():
                action()
        except BaseException as error:
            self._error = error


def copy_to_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory, DTensors as DTensors of the same layout."""
    return {name: copy_on_host(tensor) for name, tensor in tensors.items()}
