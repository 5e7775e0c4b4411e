"""``lightning-shard devices``: known devices and links with their sources, and what is here."""

import argparse
import dataclasses
import json
from typing import Any

from lightning_shard.hardware import GPUS, LINKS, Cluster


def main(argv: list[str]) -> int:
    """Print the hardware table and this machine."""
    parser = argparse.ArgumentParser(prog="lightning-shard devices", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    here = _here()
    if arguments.json:
        devices = [dataclasses.asdict(row) for row in GPUS]
        links = [dataclasses.asdict(row) for row in LINKS.values()]
        print(json.dumps({"devices": devices, "links": links, "here": here}))
        return 0
    from lightning_shard.cli.render import print_hardware

    print_hardware(GPUS, tuple(LINKS.values()), here)
    return 0


def _here() -> dict[str, Any]:
    """The cluster of this machine, or why it is not known."""
    try:
        return Cluster.detect().to_dict()
    except ValueError as error:
        return {"unknown": str(error)}
