"""Does auto-shard pick the plan that is measured fastest? On two nodes of two ranks, at three network speeds.

python tests/nodes/measure_plans.py --out results.json     (root, Linux; some four minutes on two cores)
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from namespaces import HERE, torchrun, two_nodes

SPEEDS_GBIT = (10.0, 1.0, 0.1)
WAIT_S = 280.0


def measure(gbit: float, kind: str, *, steps: int) -> dict[str, Any]:
    """What plans_job.py found on a network of this speed."""
    with tempfile.TemporaryDirectory() as folder, two_nodes(gbit * 1e9) as pair:
        out = Path(folder, "answer.json")
        script = [str(HERE / "plans_job.py"), "--out", str(out), "--kind", kind, "--steps", str(steps)]
        agents = [
            node.start(torchrun(pair, node, script, "--nnodes", "2"), Path(folder, f"{node.host}.log"))
            for node in (pair.a, pair.b)
        ]
        if any(agent.wait(timeout=WAIT_S) for agent in agents):
            raise RuntimeError(Path(folder, "node-a.log").read_text()[-4000:])
        return {"gbit": gbit, **json.loads(out.read_text())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--gbit", type=float, action="append")
    parser.add_argument("--kind", action="append", choices=("full", "lora"))
    options = parser.parse_args()
    answers = []
    for gbit in options.gbit or SPEEDS_GBIT:
        for kind in options.kind or ("full", "lora"):
            answers.append(measure(gbit, kind, steps=options.steps))
            for choice in answers[-1]["choices"]:
                chosen, fastest = choice["chosen_s"], choice["fastest_s"]
                over = "not measured" if chosen is None else f"{chosen / fastest - 1:+.1%}"
                print(f"{gbit:g} Gbit, {kind}, {choice['memory']}: chosen {over} against the fastest", flush=True)
    options.out.write_text(json.dumps(answers, indent=1) + "\n")


if __name__ == "__main__":
    main()
