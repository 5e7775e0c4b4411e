"""``lightning-shard plan``: decide how to run a training job, and say why."""

import argparse
import json
from typing import Any

from lightning_shard.cli.plot import save_plot
from lightning_shard.cli.where import Parser, add_cluster_arguments, read_cluster
from lightning_shard.hardware import LinkProfile
from lightning_shard.planner import Calibration, Decision, choose
from lightning_shard.specs import OPTIMIZERS, PRECISIONS, AdapterSpec, ModelSpec, TrainSpec, format_bytes
from lightning_shard.specs.optimizer import IMPLEMENTATIONS
from lightning_shard.specs.train import LOSSES

DOES_NOT_FIT = 1


def main(argv: list[str]) -> int:
    """Print the decision; 0 when the plan fits, 1 when nothing does."""
    arguments, train = parsed(argv)
    cluster, notes = read_cluster(arguments), []
    if arguments.links:
        cluster = LinkProfile.load(arguments.links).apply(cluster)
    if arguments.calibrate:
        calibration = Calibration.load(arguments.calibrate)
        cluster = calibration.apply(cluster)
        notes.append(calibration.describe())
    decision = choose(
        _model(arguments),
        train,
        cluster,
        headroom=arguments.headroom,
        pin=_pins(arguments.pin),
        surroundings="command line",
    )
    if arguments.simulate:
        decision, differences = _simulated(decision, train, arguments)
        notes += differences
    if arguments.plot:
        save_plot(decision, arguments.plot)
    _show(decision, notes, arguments)
    return 0 if decision.fits else DOES_NOT_FIT


def parsed(argv: list[str]) -> tuple[argparse.Namespace, TrainSpec]:
    """The command's options, and what they say is trained."""
    arguments = _parser().parse_args(argv)
    return arguments, _train(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="lightning-shard plan", description=__doc__)
    parser.add_argument("--model", required=True, help="a folder with a config.json, a saved spec, or a hub id")
    add_cluster_arguments(parser)
    train = parser.add_argument_group("what is trained")
    train.add_argument("--seq-len", type=int, default=4096, help="tokens per sequence, the longest (default 4096)")
    train.add_argument("--micro-batch-size", type=int, default=1, help="sequences per device and forward (default 1)")
    train.add_argument("--accumulate", type=int, default=1, help="micro-batches per optimizer step (default 1)")
    train.add_argument("--precision", default="bf16-true", help=f"one of {', '.join(PRECISIONS)} (default bf16-true)")
    train.add_argument("--optimizer", default="adamw", help=f"one of {', '.join(OPTIMIZERS)} (default adamw)")
    train.add_argument("--optimizer-implementation", default="foreach", choices=IMPLEMENTATIONS)
    train.add_argument("--attention", default="sdpa", choices=("sdpa", "eager"))
    train.add_argument("--loss", default="full", choices=LOSSES)
    train.add_argument("--gradients-cleared", default="after_step", choices=("after_step", "before_backward"))
    train.add_argument("--dtype", help="type the frozen weights are loaded in, where the precision leaves it open")
    train.add_argument("--master-dtype", help="type of what trains, to compare with tools without FP32 masters")
    _add_adapter_arguments(parser)
    how = parser.add_argument_group("how to decide")
    how.add_argument("--headroom", type=float, default=0.1, help="share of device memory to leave free (default 0.1)")
    how.add_argument("--pin", action="append", default=[], metavar="KEY=VALUE", help="fix a field of the plan")
    how.add_argument("--simulate", action="store_true", help="check the plan by running its step without memory")
    how.add_argument("--links", metavar="FILE", help="links as lightning-shard probe measured them")
    how.add_argument("--calibrate", metavar="FILE", help="correct by what ShardMonitor measured in an earlier run")
    how.add_argument("--all", action="store_true", help="show every plan considered")
    how.add_argument("--json", action="store_true", help="print JSON")
    how.add_argument("--plot", metavar="FILE.png", help="draw memory per plan (needs the plot extra)")
    return parser


def _add_adapter_arguments(parser: argparse.ArgumentParser) -> None:
    adapter = parser.add_argument_group("adapter (without one, everything trains)")
    adapter.add_argument("--lora-r", type=int, help="rank of a LoRA adapter")
    adapter.add_argument("--lora-targets", help="modules to adapt, comma-separated (default all-linear)")
    adapter.add_argument("--lora-alpha", type=float, help="scale (default twice the rank)")
    adapter.add_argument("--lora-dropout", type=float, default=0.0)
    adapter.add_argument("--lora-method", default="lora", choices=("lora", "rslora", "dora"))
    adapter.add_argument("--lora-compute-dtype", help="float32: plain peft without autocast")
    adapter.add_argument("--full", action="store_true", help="train everything (the default; refuses --lora-r)")


def _model(arguments: argparse.Namespace) -> ModelSpec:
    model = ModelSpec.from_pretrained(arguments.model)
    return model if arguments.dtype is None else model.with_storage(arguments.dtype)


def _train(arguments: argparse.Namespace) -> TrainSpec:
    return TrainSpec(
        micro_batch_size=arguments.micro_batch_size,
        seq_len=arguments.seq_len,
        accumulate=arguments.accumulate,
        precision=arguments.precision,
        master_dtype=arguments.master_dtype,
        adapter=_adapter(arguments),
        optimizer=arguments.optimizer,
        optimizer_implementation=arguments.optimizer_implementation,
        attention=arguments.attention,
        loss=arguments.loss,
        gradients_cleared=arguments.gradients_cleared,
    )


def _adapter(arguments: argparse.Namespace) -> AdapterSpec | None:
    if arguments.lora_r is None:
        if arguments.lora_targets:
            raise ValueError(f"--lora-targets {arguments.lora_targets} needs a rank: add --lora-r 16.")
        return None
    if arguments.full:
        raise ValueError("--full trains everything and --lora-r trains an adapter. Give one of them.")
    targets = arguments.lora_targets
    return AdapterSpec(
        method=arguments.lora_method,
        r=arguments.lora_r,
        alpha=2.0 * arguments.lora_r if arguments.lora_alpha is None else arguments.lora_alpha,
        dropout=arguments.lora_dropout,
        target_modules=_names(targets) if targets and targets != "all-linear" else "all-linear",
        compute_dtype=arguments.lora_compute_dtype,
    )


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _pins(pairs: list[str]) -> dict[str, Any]:
    pins = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ValueError(f"--pin {pair!r} is not KEY=VALUE. For example --pin activation_checkpoint=full.")
        pins[name.strip()] = _value(value.strip())
    return pins


def _value(text: str) -> Any:
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except json.JSONDecodeError:
        return text


def _simulated(decision: Decision, train: TrainSpec, arguments: argparse.Namespace) -> tuple[Decision, list[str]]:
    if arguments.model.endswith(".json"):
        raise ValueError(
            f"--simulate runs the model's own code, which the saved spec {arguments.model} does not have. Give --model the "
            "folder with its config.json, or a hub id."
        )
    from lightning_shard.simulate import differences, simulate
    from lightning_shard.simulate.confirm import confirm

    simulation = simulate(arguments.model, train, decision.plan, dtype=arguments.dtype)
    lines = [
        f"{name.replace('_', ' ')}: simulated {format_bytes(ours)}, analytic {format_bytes(theirs)}"
        for name, (ours, theirs) in differences(simulation, decision.estimate).items()
    ]
    return confirm(decision, simulation), lines


def _show(decision: Decision, notes: list[str], arguments: argparse.Namespace) -> None:
    if arguments.json:
        print(json.dumps(decision.to_dict()))
        return
    from lightning_shard.cli.render import print_decision

    print_decision(decision, show_all=arguments.all, notes=notes)
