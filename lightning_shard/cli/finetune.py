"""``lightning-shard finetune``: a recipe in, a trained adapter or model out."""

import json
import sys
import traceback
import warnings
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from rich.console import Console
from typing_extensions import override

import lightning_shard  # noqa: F401 - registers the strategies' names
from lightning_shard.callbacks import ShardMonitor
from lightning_shard.cli.render import describe, print_decision
from lightning_shard.finetune.checks import num_devices, prepare, require_strategy
from lightning_shard.finetune.data import InstructionData
from lightning_shard.finetune.hub import require_model
from lightning_shard.finetune.model import CausalLM
from lightning_shard.finetune.report import FinetuneReport, Outcome, render
from lightning_shard.finetune.rows import read_rows

DONE, HONEST_NO, BAD_INPUT = 0, 1, 2


def main(argv: list[str]) -> int:
    """Run a recipe; the arguments are those of LightningCLI, a recipe's keys among them."""
    _quiet()
    try:
        run(RecipeCLI(argv))
    except (ValueError, RuntimeError) as error:
        if not _is_ours(error):
            raise
        sys.stderr.write(f"lightning-shard finetune: {error}\n")
        return BAD_INPUT if isinstance(error, ValueError) else HONEST_NO
    return DONE


class RecipeCLI(LightningCLI):
    """LightningCLI for a recipe: CausalLM on InstructionData, with the checks that can be made before a launch."""

    def __init__(self, argv: list[str]) -> None:
        super().__init__(
            CausalLM,
            InstructionData,
            args=argv,
            run=False,
            seed_everything_default=42,
            trainer_defaults={"strategy": "auto-shard", "default_root_dir": "runs/finetune"},
            save_config_kwargs={"overwrite": True},
        )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("model.path", "data.tokenizer")
        parser.add_argument("--prepare", type=list[Path], default=[], help="Scripts to run first, for model and data.")
        parser.add_argument(
            "--cpu_processes", type=int, default=1, help="Processes where trainer.devices is auto and there is no GPU."
        )
        parser.add_argument("--json", action="store_true", help="Print the result as one JSON object and nothing else.")

    @override
    def before_instantiate_classes(self) -> None:
        """Everything that is wrong with the input and can be seen now is told now, before processes are started."""
        require_strategy(self.config.trainer.strategy)
        for script in self.config.prepare:
            prepare(script)
        require_model(self.config.model.path)
        for file in (self.config.data.train, self.config.data.validation):
            read_rows(Path(file))
        trainer = self.config.trainer
        if trainer.devices == "auto":
            trainer.devices = num_devices(trainer.accelerator, self.config.cpu_processes)
        if self.config.json:
            trainer.enable_progress_bar = trainer.enable_model_summary = False
        show = show_nothing if self.config.json else show_start
        self.report = FinetuneReport(Path(trainer.default_root_dir), show)
        self.trainer_defaults["callbacks"] = [self.report, ShardMonitor()]


def run(cli: RecipeCLI) -> Outcome:
    """Validate, fit, validate again, and print what came of it."""
    trainer, model, data = cli.trainer, cli.model, cli.datamodule
    trainer.validate(model, datamodule=data, verbose=False)
    trainer.fit(model, datamodule=data)
    trainer.validate(model, datamodule=data, verbose=False)
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
    for name, split in trainer.datamodule.splits.items():  # type: ignore[attr-defined]
        console.print(f"{name.capitalize()}: {split}.", highlight=False)
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
        ".*it is recommended to use `Trainer.devices=1.*",  # our validation is exact on any number of ranks
        ".*is_gradient_checkpointing.*",  # peft and transformers among themselves
        ".*treespec, LeafSpec.*",  # Lightning and torch among themselves
    ):
        warnings.filterwarnings("ignore", message)
