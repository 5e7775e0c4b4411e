"""``lightning-shard finetune``: a recipe in, a trained adapter or model out."""

import json
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from rich.console import Console
from typing_extensions import override

import lightning_shard  # noqa: F401 - registers the strategies' names
from lightning_shard.callbacks import ShardMonitor
from lightning_shard.cli.render import describe, print_decision
from lightning_shard.finetune.checks import prepare, require_adapter, require_checkpoint, require_strategy, settle_world
from lightning_shard.finetune.describe import describe_data
from lightning_shard.finetune.hub import require_model
from lightning_shard.finetune.limits import require_at_least
from lightning_shard.finetune.report import FinetuneReport, Outcome, render
from lightning_shard.finetune.tasks import DEFAULT, PROCESSOR, TASKS, classes

PROG = "lightning-shard finetune"
DONE, HONEST_NO, BAD_INPUT = 0, 1, 2

ROWS_READ_FIRST = 10_000
"""Rows of each source that are read before processes start, to find what is wrong with them."""


def main(argv: list[str]) -> int:
    """Run a recipe; the arguments are those of LightningCLI, a recipe's keys among them."""
    if not argv:
        return _tell(ValueError("Give a recipe: --config recipes/quickstart.yaml. --help shows all keys."), BAD_INPUT)
    _quiet()
    try:
        cli = RecipeCLI(argv)
    except (ValueError, TypeError, OSError, MisconfigurationException) as error:  # nothing has run: it is the input
        return _tell(error, BAD_INPUT)
    except RuntimeError as error:
        if not _is_ours(error):
            raise
        return _tell(error, HONEST_NO)
    try:
        run(cli)
    except MisconfigurationException as error:
        return _tell(error, BAD_INPUT)
    except (ValueError, RuntimeError) as error:
        if not _is_ours(error):
            raise
        return _tell(error, BAD_INPUT if isinstance(error, ValueError) else HONEST_NO)
    return DONE


def _tell(error: Exception, code: int) -> int:
    said = str(error).strip() or type(error).__name__
    sys.stderr.write(f"lightning-shard finetune: {said}\n")
    return code


class RecipeCLI(LightningCLI):
    """LightningCLI for a recipe: its task's module and data, with the checks that can be made before a launch."""

    def __init__(self, argv: list[str]) -> None:
        self.task = asked_task(argv)
        module, data = classes(self.task)
        super().__init__(
            module,
            data,
            args=argv,
            run=False,
            seed_everything_default=42,
            trainer_defaults={"strategy": "auto-shard", "default_root_dir": "runs/finetune"},
            # Every key in the usage would hide the error that stands below it; --help has them.
            parser_kwargs={"prog": PROG, "usage": f"{PROG} --config RECIPE.yaml [--KEY VALUE ...]"},
            save_config_callback=None,  # it writes to the working directory where there is no logger
        )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--processor",
            type=str | None,
            default=None,
            help="Where tokenizer or image processor come from, if not model.path.",
        )
        sources = ("model.path", "processor")
        parser.link_arguments(sources, f"data.{PROCESSOR[self.task]}", compute_fn=lambda path, other: other or path)
        parser.add_argument("--task", type=str, default=self.task, help=f"What to train: {', '.join(TASKS)}.")
        parser.add_argument("--prepare", type=list[Path], default=[], help="Scripts to run first, for model and data.")
        parser.add_argument("--resume", type=str | None, default=None, help="Checkpoint to go on from, or 'last'.")
        parser.add_argument(
            "--cpu_processes", type=int, default=1, help="Processes where trainer.devices is auto and there is no GPU."
        )
        parser.add_argument("--json", action="store_true", help="Print the result as one JSON object and nothing else.")

    @override
    def before_instantiate_classes(self) -> None:
        """Everything that is wrong with the input and can be seen now is told now, before processes are started."""
        trainer = self.config.trainer
        require_strategy(trainer.strategy)
        require_at_least(1, **{"trainer.accumulate_grad_batches": trainer.accumulate_grad_batches})
        require_at_least(1, **{"cpu_processes": self.config.cpu_processes})
        require_at_least(0, **{"trainer.gradient_clip_val": trainer.gradient_clip_val})
        require_checkpoint(self.config.resume)
        require_adapter(self.config.model.lora)
        for script in self.config.prepare:
            prepare(script)
        require_model(self.config.model.path)
        self._require_rows()
        settle_world(trainer, self.config.cpu_processes)
        if self.config.json:
            trainer.enable_progress_bar = trainer.enable_model_summary = False
        show = show_nothing if self.config.json else show_start
        self.report = FinetuneReport(Path(trainer.default_root_dir), show)
        self.trainer_defaults["callbacks"] = [self.report, ShardMonitor()]

    def _require_rows(self) -> None:
        """The first rows of every source, which say at once what the first epoch would say later."""
        _, data = classes(self.task)
        data(**vars(self.config.data)).require_rows(ROWS_READ_FIRST)


def asked_task(argv: list[str]) -> str:
    """The task that a recipe or the command line names: the parser is made for it.

    Raises:
        ValueError: for a recipe that is not there or no YAML.
    """
    task = DEFAULT
    for key, value in _pairs(argv):
        if key == "--task":
            task = value
        elif key in ("--config", "-c"):
            task = _read_yaml(Path(value)).get("task", task)
    return task


def _pairs(argv: list[str]) -> Iterator[tuple[str, str]]:
    """Options with their values, in both forms."""
    for word, following in zip(argv, [*argv[1:], ""], strict=False):  # of nothing there is no following
        key, equals, value = word.partition("=")
        yield key, value if equals else following


def _read_yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"There is no recipe {str(path)!r} (looked from {Path.cwd()}). Give --config a YAML file such as those in recipes/."
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ValueError(
            f"{path} is no recipe: it holds {type(found).__name__} where keys (model, data, trainer) are needed."
        )
    return found


def run(cli: RecipeCLI) -> Outcome:
    """Validate, fit, validate again, and print what came of it."""
    trainer, model, data = cli.trainer, cli.model, cli.datamodule

    def validate() -> None:
        if data.has_validation:
            trainer.validate(model, datamodule=data, verbose=False)

    validate()
    if trainer.is_global_zero:
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        cli.parser.save(cli.config, folder / "recipe.yaml", skip_none=False, overwrite=True, multifile=False)
    trainer.fit(model, datamodule=data, ckpt_path=cli.config.resume)
    validate()
    outcome = cli.report.outcome
    if trainer.is_global_zero:
        if cli.config.json:
            print(json.dumps(outcome.to_dict()))
        else:
            Console().print(render(outcome))
    return outcome


def show_start(trainer: Trainer) -> None:
    """Print what is learned from, and how the run is laid out, with the reasons where that was decided."""
    console = Console()
    console.print(describe_data(trainer.datamodule), highlight=False)  # type: ignore[attr-defined]
    decision, plan = getattr(trainer.strategy, "decision", None), getattr(trainer.strategy, "plan", None)
    if decision is not None:
        print_decision(decision)
    elif plan is not None:
        console.print(f"Plan: {plan.strategy}, {describe(plan)}. It was given, not decided.")
    else:
        console.print(f"Strategy: {type(trainer.strategy).__name__}, which has no plan.")


def show_nothing(trainer: Trainer) -> None:
    """For output that a program reads."""


def _is_ours(error: BaseException) -> bool:
    """Whether the error is a message of this package to its user rather than a fault underneath."""
    last = list(traceback.walk_tb(error.__traceback__))[-1][0]
    return str(last.f_globals.get("__name__", "")).startswith("lightning_shard.")


def _quiet() -> None:
    """Leave out what says nothing about this run."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    for message in (
        ".*LightningCLI's args parameter.*",
        ".*does not have many workers.*",  # rows lie in memory
        ".*Total length of `list` across ranks is zero.*",  # there is nothing to validate on
        ".*it is recommended to use `Trainer.devices=1.*",  # our validation is exact on any number of ranks
        ".*is_gradient_checkpointing.*",  # peft and transformers among themselves
        ".*treespec, LeafSpec.*",  # Lightning and torch among themselves
        "(?s).*was deprecated in v4.49.0 and will be removed in v5.0.0.*",  # jsonargparse; older ones have no other name
    ):
        warnings.filterwarnings("ignore", message)
