"""``lightning-shard report RUN``: a run that ShardMonitor recorded, as a page with pictures."""

import argparse
import json

from lightning_shard.report import write_report
from lightning_shard.report.record import RunRecord


def main(argv: list[str]) -> int:
    """Write the page and say where it is."""
    parser = argparse.ArgumentParser(prog="lightning-shard report", description=__doc__)
    parser.add_argument("run", help="the run's folder (with a shard_monitor.json), or that file")
    parser.add_argument("--output", metavar="FOLDER", help="where the page goes (default: report, beside the record)")
    parser.add_argument("--json", action="store_true", help="print the run's figures and the page's path as JSON")
    arguments = parser.parse_args(argv)
    page = write_report(arguments.run, arguments.output)
    if arguments.json:
        record = RunRecord.load(arguments.run)
        print(json.dumps({"page": str(page.resolve()), "measured": record.measured, "estimate": record.estimate}))
    else:
        print(f"Written to {page.resolve()}; open it in any browser.")
    return 0
