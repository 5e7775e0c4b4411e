"""Memory per plan as a picture, and as a bar in the terminal."""

from pathlib import Path

from rich.text import Text

from lightning_shard.planner import Decision

GIB = 2**30
COLOURS = ("blue", "green", "yellow", "magenta", "cyan", "red", "white", "bright_blue", "bright_green", "bright_yellow")
WIDTH = 38
SHOWN = 6


def stacked_bars(decision: Decision, width: int = WIDTH) -> list[Text]:
    """One bar per plan, a colour per term, scaled to the fullest; a mark where the usable memory ends."""
    rows = _rows(decision)
    scale = max(decision.limit_bytes, *(sum(terms.values()) for _, terms in rows)) / width
    colours = _colours(rows)
    lines = []
    for label, terms in rows:
        line = Text(f"{label:<26.26} ")
        for name, size in terms.items():
            line.append("█" * round(size / scale), style=colours[name])
        used, limit = len(line.plain) - 27, round(decision.limit_bytes / scale)
        line.append(
            " " * max(0, limit - used) + ("|" if used <= limit else "") + f" {sum(terms.values()) / GIB:.2f} GiB"
        )
        lines.append(line)
    legend = Text("  ")
    for name, colour in colours.items():
        legend.append("█ ", style=colour)
        legend.append(f"{name.replace('_', ' ')}  ")
    return [*lines, legend]


def save_plot(decision: Decision, path: str) -> None:
    """A stacked bar per plan as PNG.

    Raises:
        ValueError: when matplotlib is missing, or the folder is.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install 'lightning-shard[plot]'.") from error
    if not Path(path).absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: its folder does not exist. Make it first.")
    rows = _rows(decision)
    figure = Figure(figsize=(10, 1.2 + 0.5 * len(rows)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(rows)
    for name in _colours(rows):
        sizes = [terms.get(name, 0) / GIB for _, terms in rows]
        axes.barh([label for label, _ in rows], sizes, left=left, label=name.replace("_", " "))
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    axes.axvline(decision.limit_bytes / GIB, color="black", linestyle="--", label="usable")
    axes.invert_yaxis()
    axes.set_xlabel("GiB per device at the peak")
    axes.legend(fontsize="small", ncols=2, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=120)


def _rows(decision: Decision) -> list[tuple[str, dict[str, int]]]:
    from lightning_shard.cli.render import describe

    rejected = [(f"{describe(row.plan)}", row.terms) for row in decision.rejected if row.terms][: SHOWN - 1]
    return [(f"* {describe(decision.plan)}", decision.estimate.terms), *rejected]


def _colours(rows: list[tuple[str, dict[str, int]]]) -> dict[str, str]:
    names = list(dict.fromkeys(name for _, terms in rows for name in terms))
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
