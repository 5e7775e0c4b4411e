"""``lightning-shard probe``: measure the collectives of this cluster and keep them for later plans."""

import argparse
import dataclasses
import json

from rich.console import Console
from rich.table import Table

from lightning_shard.hardware.profile import LinkProfile


def main(argv: list[str]) -> int:
    """Probe, print, and write the profile where asked."""
    parser = argparse.ArgumentParser(
        prog="lightning-shard probe",
        description="Measure all-gathers and all-reduces of this machine's devices, or of the ranks that torchrun "
        "started, and fit latency and bandwidth.",
    )
    parser.add_argument("--devices", type=int, help="processes to start (default: one per accelerator, two on a host)")
    parser.add_argument("--output", metavar="FILE", help="write the profile here; plan --links and auto-shard read it")
    parser.add_argument("--json", action="store_true", help="print the profile as JSON")
    arguments = parser.parse_args(argv)
    from lightning_shard.probe import probe

    profile = probe(arguments.devices)
    if profile is None:  # another rank of a launched job speaks
        return 0
    if arguments.output:
        profile.save(arguments.output)
    if arguments.json:
        print(json.dumps({**dataclasses.asdict(profile), "timings": list(profile.timings)}))
    else:
        _show(profile, arguments.output)
    return 0


def _show(profile: LinkProfile, output: str | None) -> None:
    table = Table(title=f"{profile.world_size} ranks over {profile.backend}, {profile.date}")
    for column in ("link", "GB/s", "all-gather", "all-reduce", "latency us"):
        table.add_column(column, justify="left" if column == "link" else "right")
    for name, link in (("inside a node", profile.intra), ("between nodes, a whole node", profile.inter)):
        if link is not None:
            reached = (f"{link.all_gather_share:.0%}", f"{link.all_reduce_share:.0%}")
            table.add_row(name, f"{link.bytes_per_s / 1e9:.2f}", *reached, f"{link.latency_s * 1e6:.0f}")
    console = Console()
    console.print(table)
    if output:
        console.print(f"Written to {output}; use it with lightning-shard plan --links {output}.")
