"""A report as one HTML page: no script, no network, nothing but itself. Text from cells is escaped by the template engine."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from batchllm.data.report import Report, Rows
from batchllm.data.report_charts import curve_chart, latency_chart, tier_chart
from batchllm.data.report_numbers import duration, moment, number, share, size
from batchllm.errors import write_error
from batchllm.planner.roofline import roofline_text

PAGE_FILE = "report.html"
_TEMPLATE = Path(__file__).with_name("report.html.jinja")
_TABLE_ROWS = 30


@dataclass(frozen=True, slots=True)
class Chart:
    """A drawing, what it shows in words, and the same data as a table: (headings, rows of text)."""

    title: str
    summary: str
    drawing: Markup
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]


def render_page(report: Report) -> str:
    """The page's HTML."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, auto_reload=False
    )
    environment.filters |= {
        "number": number,
        "share": share,
        "duration": duration,
        "size": size,
        "moment": moment,
        "visible": visible,
    }
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        report=report,
        figures=report.figures,
        curves=_curves(report),
        latencies=[(latency, _latency(latency)) for latency in report.latencies],
        changes=_changes(report.runs),
        roofline=None if report.figures["roofline"] is None else roofline_text(json.loads(report.figures["roofline"])),
        number=number,
        share=share,
        duration=duration,
    )


def write_page(report: Report, path: Path) -> None:
    """Writes the page so that it appears whole. Raises FolderError or OutputError."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.write_text(render_page(report), encoding="utf-8")
        os.rename(temporary, path)
    except OSError as error:
        raise write_error(f"{path}: the report cannot be written; name a file with --output", error) from None


def visible(text: str | None) -> str:
    """Text with its control characters shown: HTML has no form for some, and others turn the reading direction."""
    shown = (c if c.isprintable() or c == "\n" else f"\\u{ord(c):04x}" for c in text or "")
    return "".join(shown)


def _curves(report: Report) -> list[Chart]:
    rows = report.curve
    if not rows:
        return []
    charts = [
        _curve(
            "Throughput",
            rows,
            (("prompt_tokens_per_s", "prompt tokens computed"), ("output_tokens_per_s", "output tokens")),
            unit="tokens per second",
        ),
        _curve("Sequences", rows, (("running", "running"), ("waiting", "waiting")), unit="sequences"),
    ]
    if report.tiers:
        charts.append(_tiers(report.tiers))
    if any(row["kv_bytes"] for row in rows):
        in_mib = [row | {"mib": row["kv_bytes"] / 2**20} for row in rows]
        charts.append(_curve("Keys and values on the device", in_mib, (("mib", "in use"),), unit="MiB"))
    return charts


def _curve(title: str, rows: Rows, series: tuple[tuple[str, str], ...], *, unit: str) -> Chart:
    peaks = [f"{label}: at most {number(max(row[column] for row in rows))}" for column, label in series]
    picked = rows[:: max(1, -(-len(rows) // _TABLE_ROWS))]
    return Chart(
        title=title,
        summary=f"{title} over time in {unit}. {'; '.join(peaks)}.",
        drawing=Markup(curve_chart(rows, series, unit=unit)),
        headings=("second", *(label for _, label in series)),
        rows=[(f"{row['second']:.1f}", *(number(row[column]) for column, _ in series)) for row in picked],
    )


def _tiers(rows: Rows) -> Chart:
    most = {str(row["tier"]): max(r["used_bytes"] for r in rows if r["tier"] == row["tier"]) for row in rows}
    picked = rows[:: max(1, -(-len(rows) // _TABLE_ROWS))]
    return Chart(
        title="Keys and values by tier",
        summary="Bytes held by each tier over time. "
        + "; ".join(f"{tier}: at most {size(num)}" for tier, num in most.items()),
        drawing=Markup(tier_chart(rows)),
        headings=("second", "tier", "held"),
        rows=[(f"{row['second']:.1f}", str(row["tier"]), size(row["used_bytes"])) for row in picked],
    )


def _latency(latency: Any) -> Chart | None:
    if not latency.bars:
        return None
    return Chart(
        title=f"{latency.column}: {latency.label}",
        summary=f"Distribution of {latency.column} over {number(latency.num_rows)} samples: half within "
        f"{duration(latency.p50)}, 99 % within {duration(latency.p99)}, the longest {duration(latency.most)}.",
        drawing=Markup(latency_chart(latency)),
        headings=("from", "to", "samples"),
        rows=[(duration(bar["low"]), duration(bar["high"]), number(bar["num_rows"])) for bar in latency.bars],
    )


def _changes(runs: Rows) -> dict[str, str]:
    """What this run's speed and time are beside those of the run before it, where both are known."""
    if len(runs) < 2:
        return {}
    changes = {}
    for key in ("output_tokens_per_s", "wall_s"):
        now, before = runs[0].get(key), runs[1].get(key)
        if now and before:
            changes[key] = f"{now / before - 1:+.0%}"
    return changes
