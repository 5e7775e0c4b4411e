"""One entry point: run a benchmark, or make the README's tables from what was measured.

python -m benchmarks list
python -m benchmarks run step_time --device cpu --only s-lora-2
python -m benchmarks tables
"""

import argparse
import shlex
import signal
import sys
from types import FrameType

from benchmarks.options import NAMES, Options, load
from benchmarks.report import write_tables
from benchmarks.results import RESULTS, save


def main(argv: list[str]) -> int:
    """Exit code 0; a benchmark that finds its own claim untrue raises."""
    arguments = _parser().parse_args(argv)
    if arguments.command == "list":
        for name in NAMES:
            print(f"{name:<16} {(load(name).__doc__ or '').splitlines()[0]}")
        return 0
    if arguments.command == "tables":
        write_tables(arguments.results)
        return 0
    options = Options(
        device=arguments.device,
        smallest=arguments.smallest,
        simulate=arguments.simulate,
        link=arguments.link,
        only=tuple(arguments.only),
        command=f"python -m benchmarks {shlex.join(argv)}",
    )
    signal.signal(signal.SIGTERM, _leave)  # so that ranks and namespaces do not outlive a time-out
    for rows in load(arguments.name).run(options):
        if arguments.results or not arguments.smallest:
            save(arguments.name, rows, options, arguments.results or RESULTS)
    return 0


def _leave(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="names and what they measure")
    run = commands.add_parser("run", help="run one benchmark and keep its results")
    run.add_argument("name", choices=NAMES)
    run.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    run.add_argument("--smallest", action="store_true", help="seconds instead of minutes; kept only with --results")
    run.add_argument("--simulate", action="store_true", help="memory_accuracy: simulate every row as well")
    run.add_argument("--link", default="loopback", help="residency: loopback, 10gbit, 1gbit or 100mbit (needs root)")
    run.add_argument("--only", action="append", default=[], metavar="TEXT", help="cases whose name holds this text")
    run.add_argument("--results", help=f"folder of the result files (default {RESULTS})")
    tables = commands.add_parser("tables", help="write the tables of README.md from the result files")
    tables.add_argument("--results", default=RESULTS)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
