"""The pictures of a run, as PNG."""

import io
from collections.abc import Callable
from typing import Any

from lightning_shard.report.record import RunRecord

GIB, MIB = 2**30, 2**20
INK, GRID = "#222222", "#dddddd"
COLOURS = ("#33608c", "#b5503c", "#4c8c4a", "#c99a2e", "#7a5195", "#5f9ea0", "#8c564b", "#999999")


def draw_all(record: RunRecord) -> dict[str, bytes]:
    """Name to PNG; a picture that the run has no figures for is left out.

    Raises:
        ValueError: when matplotlib is missing.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ValueError("The report needs matplotlib: pip install 'lightning-shard[plot]'.") from error
    drawn = {name: draw(record) for name, draw in PICTURES.items()}
    return {name: data for name, data in drawn.items() if data is not None}


def loss(record: RunRecord) -> bytes | None:
    """Training and validation loss over optimizer steps."""
    train = _points(record.history, "loss")
    validation = _points(record.validation, "val_loss")
    if not train and not validation:
        return None
    figure, axes = _figure("Loss", "optimizer step", "loss")
    _line(axes, train, "training", COLOURS[0])
    _line(axes, validation, "validation", COLOURS[1], marker="o")
    axes.legend(frameon=False)
    return _png(figure)


def throughput(record: RunRecord) -> bytes | None:
    """Tokens (or samples) per second of all devices, against the prediction."""
    unit = "tokens" if _points(record.history, "tokens_per_s") else "samples"
    measured = _points(record.history, f"{unit}_per_s")
    if not measured:
        return None
    figure, axes = _figure("Throughput", "optimizer step", f"{unit} per second, all devices")
    _line(axes, measured, "measured", COLOURS[0], marker=".")
    predicted = (record.estimate or {}).get("tokens_per_s")
    if predicted and unit == "tokens":
        axes.axhline(predicted, color=COLOURS[1], linestyle="--", label="predicted")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="lower right")
    return _png(figure)


def memory(record: RunRecord) -> bytes | None:
    """Memory by term, estimated beside measured."""
    if not record.memory:
        return None
    figure, axes = _figure("Memory of one device at the peak", "", "")
    sizes = [size for _, *pair in record.memory for size in pair if size is not None]
    unit, name = (GIB, "GiB") if sum(sizes) > GIB else (MIB, "MiB")
    starts = [0.0, 0.0]
    for index, (term, *pair) in enumerate(record.memory):
        widths = [max(0, size or 0) / unit for size in pair]
        colour = COLOURS[index % len(COLOURS)]
        axes.barh(["estimated", "measured"], widths, left=starts, color=colour, label=term.replace("_", " "))
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel(name)
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    return _png(figure)


def communication(record: RunRecord) -> bytes | None:
    """When the profiled step computed and when it communicated."""
    window = record.window
    if window is None or not any(window["lanes"].values()):
        return None
    shown = f"{window['comm_s'] * 1e3:,.1f} ms of communication, {window['exposed_s'] * 1e3:,.1f} ms of it exposed"
    figure, axes = _figure(f"Step {window['step']}: {shown}", "ms from the start of the step", "", height=2.2)
    lanes = list(window["lanes"].items())
    for row, (_, intervals) in enumerate(lanes):
        spans = [(start * 1e3, (end - start) * 1e3) for start, end in intervals]
        axes.broken_barh(spans, (row - 0.35, 0.7), facecolors=COLOURS[row], linewidth=0)
    axes.set_yticks(range(len(lanes)), [name for name, _ in lanes])
    axes.set_xlim(0, window["window_s"] * 1e3)
    axes.invert_yaxis()
    return _png(figure)


PICTURES: dict[str, Callable[[RunRecord], bytes | None]] = {
    "loss": loss,
    "throughput": throughput,
    "memory": memory,
    "communication": communication,
}
"""File name to what draws it."""


def _points(rows: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def _line(axes: Any, points: list[tuple[int, float]], label: str, colour: str, marker: str = "") -> None:
    if points:
        axes.plot(*zip(*points, strict=True), label=label, color=colour, marker=marker)


def _figure(title: str, x_label: str, y_label: str, height: float = 3.2) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", color=INK)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=120, format="png")
    return buffer.getvalue()
