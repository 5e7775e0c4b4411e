"""Write the page and its pictures."""

from pathlib import Path

from lightning_shard.report.page import page
from lightning_shard.report.plots import draw_all
from lightning_shard.report.record import RunRecord


def write_report(run: str | Path, folder: str | Path | None = None) -> Path:
    """Draw a run that ShardMonitor recorded; returns the page.

    Args:
        run: its folder, or the ``shard_monitor.json`` in it.
        folder: where ``index.html`` and the PNG files go; ``report`` beside the record by default.

    Raises:
        ValueError: when there is no record, or matplotlib is missing.
    """
    record = RunRecord.load(run)
    beside = Path(run) if Path(run).is_dir() else Path(run).parent
    target = Path(folder) if folder is not None else beside / "report"
    pictures = draw_all(record)
    target.mkdir(parents=True, exist_ok=True)
    for name, data in pictures.items():
        (target / f"{name}.png").write_bytes(data)
    index = target / "index.html"
    index.write_text(page(record, pictures, title=beside.resolve().name), encoding="utf-8")
    return index
