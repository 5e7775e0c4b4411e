"""The page: one HTML file that holds everything, pictures included."""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from lightning_shard.planner import expected_step_s
from lightning_shard.report.advice import advice
from lightning_shard.report.record import RunRecord
from lightning_shard.specs import format_bytes

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; } td, th { padding: .2rem .9rem .2rem 0; text-align: left; font-weight: normal; }
th { color: #666; border-bottom: 1px solid #ccc; } td.number, th.number { text-align: right; }
img { max-width: 100%; display: block; margin: 1rem 0; } code { background: #f3f3f3; padding: 0 .2rem; }
"""
MEANINGS = {
    "loss": "Loss of the logged steps, and of each validation.",
    "throughput": "Tokens that the attention mask leaves, of all devices. Profiled steps and steps with a validation or a "
    "checkpoint before them are left out.",
    "memory": "What lies in memory of rank 0. The rest of the peak is activations, gathered weights and gradients in flight.",
    "communication": "One step of rank 0 under the profiler. Communication is exposed where nothing is computed beside it.",
}


def page(record: RunRecord, pictures: Mapping[str, bytes], title: str) -> str:
    """HTML that needs no other file and no network."""
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(_what(record))}</p>",
        "<h2>Predicted and measured</h2>",
        _table(("", "predicted", "measured"), _figures(record), numbers=(1, 2)),
        *_advice(record),
        *(_picture(name, data) for name, data in pictures.items()),
        "<h2>Memory by term</h2>",
        _table(("term", "estimated", "measured"), _memory(record.memory), numbers=(1, 2)),
        "<h2>Ranks</h2>",
        _table(
            ("rank", "step", "own work", "data wait", "communication", "exposed"), _ranks(record), numbers=range(1, 6)
        ),
        "<h2>Plan</h2>",
        f"<p><code>{escape(json.dumps(record.plan))}</code></p>",
    ]
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


def _what(record: RunRecord) -> str:
    run, steps = record.run, record.measured.get("steps", 0)
    return (
        f"{steps} optimizer steps on {run.get('world_size')} x {run.get('device')} under {run.get('strategy')}, "
        f"precision {run.get('precision')}, started {run.get('started')}."
    )


def _figures(record: RunRecord) -> list[tuple[str, str, str]]:
    measured = record.measured
    estimate = {**(record.estimate or {}), "expected_step_s": expected_step_s(record.estimate or {}, measured)}
    rows: tuple[tuple[str, str | None, str, Any], ...] = (
        ("step, median (predicted for batches as full as these)", "expected_step_s", "step_s", _ms),
        ("step, 90th percentile", None, "step_p90_s", _ms),
        ("step, 99th percentile", None, "step_p99_s", _ms),
        ("tokens per second, all devices", "tokens_per_s", "tokens_per_s", _count),
        ("MFU", "mfu", "mfu", _share),
        ("communication", None, "comm_share", _share),
        ("exposed communication", "comm_share", "exposed_comm_share", _share),
        ("waiting for data", None, "data_wait_share", _share),
        ("allocated", "allocated_bytes", "allocated_bytes", _bytes),
        ("reserved", "reserved_bytes", "reserved_bytes", _bytes),
    )
    found = [(name, show(estimate.get(key) if key else None), show(measured.get(of))) for name, key, of, show in rows]
    return [row for row in found if row[2] != "-"]


def _memory(rows: Iterable[Sequence[Any]]) -> list[tuple[str, str, str]]:
    return [(str(term).replace("_", " "), _bytes(estimated), _bytes(measured)) for term, estimated, measured in rows]


def _ranks(record: RunRecord) -> list[tuple[str, ...]]:
    return [
        (
            str(row["rank"]),
            _ms(row["run_step_p50_s"]),
            _ms(row["own_s"]),
            _ms(row["wait_s"]),
            _share(row["comm_share"]),
            _share(row["exposed_comm_share"]),
        )
        for row in record.ranks
    ]


def _advice(record: RunRecord) -> list[str]:
    lines = advice(record)
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return ["<h2>What to look at</h2>", f"<ul>{items}</ul>"] if lines else []


def _picture(name: str, data: bytes) -> str:
    source = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return f'<h2>{name.capitalize()}</h2>\n<p>{escape(MEANINGS[name])}</p>\n<img alt="{name}" src="{source}">'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Iterable[int]) -> str:
    kinds = set(numbers)

    def line(cells: Sequence[str], tag: str) -> str:
        marks = [' class="number"' if i in kinds else "" for i in range(len(cells))]
        return "<tr>" + "".join(f"<{tag}{m}>{escape(c)}</{tag}>" for c, m in zip(cells, marks, strict=True)) + "</tr>"

    return f"<table>{line(head, 'th')}{''.join(line(row, 'td') for row in rows)}</table>"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f} ms"


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _count(number: float | None) -> str:
    return "-" if not number else f"{number:,.0f}"


def _bytes(size: int | None) -> str:
    return "-" if size is None else format_bytes(size)
