"""Private names of Lightning's Trainer that stopping and saving touch, and a question to any strategy of it."""

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lightning_shard._compat import NAMESPACE, Trainer

if TYPE_CHECKING:
    from lightning.pytorch.callbacks import BatchSizeFinder
    from lightning.pytorch.utilities.exceptions import SIGTERMException
    from lightning.pytorch.utilities.memory import is_oom_error
else:
    BatchSizeFinder = importlib.import_module(f"{NAMESPACE}.callbacks").BatchSizeFinder
    is_oom_error = importlib.import_module(f"{NAMESPACE}.utilities.memory").is_oom_error
    SIGTERMException = importlib.import_module(f"{NAMESPACE}.utilities.exceptions").SIGTERMException

__all__ = [
    "SIGTERMException",
    "hand_back_loop",
    "is_oom_error",
    "model_checkpoints",
    "num_data_ranks",
    "name_epochs_plainly",
    "saves_on_exception",
    "take_over_links",
    "take_over_loop",
    "take_over_signals",
    "take_over_size_finders",
]


def take_over_signals(trainer: "Trainer", *, terminate: Any, requeue: Any) -> Any:
    """Have Lightning register these handlers for SIGTERM and SLURM's requeue signal; returns its own for the latter.

    Lightning's own broadcast and save inside the handler, where other ranks may be anywhere. Call it before they are
    registered; can go when a strategy may handle signals.
    """
    connector: Any = trainer._signal_connector
    connector._sigterm_notifier_fn = terminate
    connector._slurm_sigusr_handler_fn = requeue
    return functools.partial(type(connector)._slurm_sigusr_handler_fn, connector)


def take_over_loop(trainer: "Trainer", before_batch: Callable[[], None]) -> None:
    """Call ``before_batch`` before each batch that begins a step, instead of Lightning's broadcast of a flag.

    The broadcast costs 1.8 ms a batch and waits for the device; can go when Lightning leaves it to the strategy.
    """
    loop: Any = trainer.fit_loop.epoch_loop
    advance = type(loop).advance

    def watched(data_fetcher: Any) -> None:
        if loop.batch_progress.current.ready % trainer.accumulate_grad_batches == 0:
            before_batch()
        advance(loop, data_fetcher)

    loop.advance = watched
    loop._broadcast_sigterm_tensor = lambda: None


def hand_back_loop(trainer: "Trainer") -> None:
    """Undo :func:`take_over_loop`."""
    for name in ("advance", "_broadcast_sigterm_tensor"):
        trainer.fit_loop.epoch_loop.__dict__.pop(name, None)


def model_checkpoints(trainer: "Trainer") -> list[Any]:
    """The run's ModelCheckpoint callbacks."""
    return [callback for callback in trainer.checkpoint_callbacks if hasattr(callback, "best_k_models")]


def saves_on_exception(trainer: "Trainer") -> bool:
    """Whether a callback will save by itself when the run is left with an exception."""
    return any(
        getattr(callback, "save_on_exception", False) or type(callback).__name__ == "OnExceptionCheckpoint"
        for callback in trainer.checkpoint_callbacks
    )


def take_over_links(trainer: "Trainer", link: Callable[..., None]) -> None:
    """Have ModelCheckpoint set its links to the newest checkpoint by ``link``.

    Its own removes the old link first, and would point at what a background save has not finished; can go when that
    is the strategy's business, as removing checkpoints is.
    """
    for callback in model_checkpoints(trainer):
        callback._link_checkpoint = link


def take_over_size_finders(
    trainer: "Trainer", search: Callable[[], AbstractContextManager[Callable[[Callable[[], Any]], None]]]
) -> None:
    """Have Lightning's BatchSizeFinder run under this strategy, each of its trials by what ``search`` yields.

    It refuses every strategy of many ranks, and those of ours on one rank too; can go when it asks the strategy.
    """
    for callback in vars(trainer).get("callbacks", ()):
        if isinstance(callback, BatchSizeFinder):
            callback.setup = functools.partial(_setup_finder, callback)  # type: ignore[method-assign]
            callback.scale_batch_size = functools.partial(_search, callback, search)  # type: ignore[method-assign]


def name_epochs_plainly(trainer: "Trainer") -> None:
    """Have Lightning's rich progress bar say "Epoch 0", not "Epoch 0/-2", where steps and not epochs end the run.

    It counts to ``max_epochs - 1`` and takes the -1 that stands for "no limit" for a number; can go when it does not.
    """
    bar: Any = trainer.progress_bar_callback
    if trainer.max_epochs == -1 and hasattr(bar, "_get_train_description"):
        describe = bar._get_train_description
        bar._get_train_description = lambda epoch: describe(epoch).replace("/-2", "")


class _OneDevice:
    """A trainer that calls itself not distributed, which is all that the finder's checks ask of its connector."""

    _accelerator_connector = SimpleNamespace(is_distributed=False)

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)


def _setup_finder(callback: Any, trainer: "Trainer", pl_module: Any, stage: str | None = None) -> None:
    type(callback).setup(callback, _OneDevice(trainer), pl_module, stage)


def _search(callback: Any, search: Any, trainer: "Trainer", pl_module: Any) -> None:
    loop: Any = trainer._active_loop
    run = loop.run
    with search() as try_size:
        loop.run = lambda: try_size(run)
        try:
            type(callback).scale_batch_size(callback, trainer, pl_module)
        finally:
            del loop.run


def num_data_ranks(trainer: "Trainer") -> int:
    """Ranks that see different batches, which is what gradients are averaged over."""
    kwargs: dict[str, Any] | None = getattr(trainer.strategy, "distributed_sampler_kwargs", None)
    return int(kwargs["num_replicas"]) if kwargs else 1
