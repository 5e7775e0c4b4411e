"""Tables for people. GiB and milliseconds exist only here."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_shard.cli.plot import stacked_bars
from lightning_shard.hardware import Device, Link
from lightning_shard.memory import Estimate
from lightning_shard.planner import Decision, Rejected
from lightning_shard.plans import Plan

GIB = 2**30
SHOWN = 4


def print_decision(decision: Decision, *, show_all: bool = False, notes: Sequence[str] = ()) -> None:
    """The plan, its memory and time, the others, and what would help."""
    console = Console()
    verdict = "[bold green]fits[/]" if decision.fits else "[bold red]does not fit[/]"
    console.print(f"[bold]{decision.plan.strategy}[/] {verdict}: {decision.reason}.")
    console.print(f"Plan: {describe(decision.plan)}")
    console.print(_memory_table(decision))
    console.print(_speed(decision.estimate))
    if decision.rejected:
        console.print(_rejected_table(decision.rejected, show_all=show_all))
    for bar in stacked_bars(decision):
        console.print(bar)
    for line in notes:
        console.print(line)
    console.print(_checklist_table(decision))
    for line in decision.advice:
        console.print(f"- {line}")
    for line in decision.estimate.not_modelled:
        console.print(f"[dim]Not modelled: {line}.[/]")


def describe(plan: Plan) -> str:
    """The fields of a plan that differ from the default."""
    default = Plan().to_dict()
    changed = {name: value for name, value in plan.to_dict().items() if value != default[name]}
    return ", ".join(f"{name}={value}" for name, value in changed.items()) or "one device, nothing changed"


def _memory_table(decision: Decision) -> Table:
    estimate = decision.estimate
    table = Table(title=f"Memory per device at the peak ({estimate.peak_at})", title_justify="left")
    table.add_column("term")
    table.add_column("GiB", justify="right")
    for name, size in sorted(estimate.terms.items(), key=lambda row: -row[1]):
        table.add_row(name.replace("_", " "), _gib(size))
    table.add_section()
    for name in ("allocated_bytes", "reserved_bytes", "device_bytes", "load_peak_bytes", "resume_peak_bytes"):
        table.add_row(name.removesuffix("_bytes").replace("_", " "), _gib(getattr(estimate, name)))
    table.add_row(f"usable ({decision.headroom:.0%} headroom)", _gib(decision.limit_bytes))
    return table


def _checklist_table(decision: Decision) -> Table:
    table = Table(title="Checklist", title_justify="left", show_header=False)
    for answer in decision.checklist:
        table.add_row(answer.topic, answer.answer)
    return table


def _speed(estimate: Estimate) -> str:
    return (
        f"Step {estimate.step_s * 1000:,.1f} ms, {estimate.tokens_per_s:,.0f} tokens/s in all, "
        f"{estimate.comm_share:.0%} waiting for {estimate.comm_bytes / GIB:.2f} GiB sent per device, "
        f"MFU {estimate.mfu:.0%} ({estimate.method})."
    )


def _rejected_table(rejected: tuple[Rejected, ...], *, show_all: bool) -> Table:
    shown = rejected if show_all else rejected[:SHOWN]
    more = len(rejected) - len(shown)
    table = Table(title="Not taken" + (f" ({more} more with --all)" if more else ""), title_justify="left")
    for column in ("strategy", "plan", "GiB", "ms a step", "why not"):
        table.add_column(column, justify="right" if column in ("GiB", "ms a step") else "left")
    for row in shown:
        milliseconds = f"{row.step_s * 1000:,.1f}"
        table.add_row(row.plan.strategy, describe(row.plan), _gib(row.device_bytes), milliseconds, row.reason)
    return table


def print_hardware(devices: tuple[Device, ...], links: tuple[Link, ...], here: dict[str, Any]) -> None:
    """Both hardware tables and this machine."""
    console = Console()
    table = Table(title="Devices (dense peaks)", title_justify="left")
    for column in ("name", "GiB", "TB/s", "BF16 TFLOP/s", "FP32 TFLOP/s", "link", "source"):
        table.add_column(column, justify="left" if column in ("name", "link", "source") else "right")
    for row in devices:
        speeds = (f"{row.memory_bytes_per_s / 1e12:.2f}", f"{row.flops_of('bfloat16') / 1e12:,.0f}")
        single = f"{row.flops_of('float32') / 1e12:,.1f}"
        table.add_row(row.name, f"{row.memory_bytes / GIB:.0f}", *speeds, single, row.intra_link, row.source)
    console.print(table)
    console.print(_link_table(links))
    console.print(_here(here))


def _link_table(links: tuple[Link, ...]) -> Table:
    table = Table(title="Links (per device, one way)", title_justify="left")
    for column in ("name", "scope", "planned GB/s", "peak GB/s", "source"):
        table.add_column(column, justify="right" if "GB/s" in column else "left")
    for row in links:
        scope = f"{row.scope}{', per node' if row.shared_by_node else ''}"
        table.add_row(row.name, scope, f"{row.bytes_per_s / 1e9:g}", f"{row.peak_bytes_per_s / 1e9:g}", row.source)
    return table


def _here(here: dict[str, Any]) -> str:
    if "unknown" in here:
        return str(here["unknown"])
    memory = here["device_memory_bytes"] or here["device"]["memory_bytes"]
    return f"Here: {here['devices_per_node']} x {here['device']['name']}, {_gib(memory)} GiB each."


def _gib(size: int) -> str:
    return f"{size / GIB:,.2f}"
