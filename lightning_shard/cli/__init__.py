"""The command ``lightning-shard``: one file per sub-command, loaded when it is asked for.

Exit codes: 0 done, 1 an honest no (the plan does not fit), 2 bad input.
"""

import sys
from collections.abc import Callable
from importlib import import_module

COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("plan", "decide how to run a training job, and say why"),
    "spec": ("spec", "write what the planner knows about a model as JSON"),
    "devices": ("devices", "list known devices and links, and what is here"),
    "probe": ("probe", "measure the links of this cluster"),
    "doctor": ("doctor", "check this machine, and that all ranks answer"),
    "report": ("report", "draw a run that ShardMonitor recorded"),
    "finetune": ("finetune", "fine-tune a causal language model from a recipe"),
    "export": ("export", "turn a checkpoint into what peft, transformers and Lightning load"),
}
"""Name to (file, one line of help)."""

BAD_INPUT = 2


def main(argv: list[str] | None = None) -> int:
    """Run one sub-command with the arguments after its name."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else BAD_INPUT
    if arguments[0] == "--version":
        from lightning_shard import __version__

        print(f"lightning-shard {__version__}")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        print(f"lightning-shard: there is no command {name!r}. Commands: {', '.join(COMMANDS)}.", file=sys.stderr)
        return BAD_INPUT
    command: Callable[[list[str]], int] = import_module(f"lightning_shard.cli.{COMMANDS[name][0]}").main
    return _run(name, command, rest)


def _run(name: str, command: Callable[[list[str]], int], arguments: list[str]) -> int:
    """A command's exit code; a ValueError that was raised for the user becomes one line and exit code 2."""
    if name == "finetune":  # LightningCLI speaks for itself
        return command(arguments)
    try:
        return command(arguments)
    except ValueError as error:
        print(f"lightning-shard {name}: {error}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:  # the reader of our output has gone (| head)
        sys.stderr.close()
        return 0


def _usage() -> str:
    rows = "\n".join(f"  {name:<10} {help_text}" for name, (_, help_text) in COMMANDS.items())
    return f"usage: lightning-shard COMMAND ...\n\n{rows}\n\nlightning-shard COMMAND --help shows a command's options."
