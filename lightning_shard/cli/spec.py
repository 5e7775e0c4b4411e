"""``lightning-shard spec MODEL > spec.json``: what the planner knows about a model."""

import argparse
import json

from lightning_shard.specs import ModelSpec


def main(argv: list[str]) -> int:
    """Print a ModelSpec as JSON."""
    parser = argparse.ArgumentParser(prog="lightning-shard spec", description=__doc__)
    parser.add_argument("model", help="a folder with a config.json (weights not needed), a saved spec, or a hub id")
    parser.add_argument("--json", action="store_true", help="accepted for symmetry: the output is always JSON")
    arguments = parser.parse_args(argv)
    print(json.dumps(ModelSpec.from_pretrained(arguments.model).to_dict(), indent=1))
    return 0
