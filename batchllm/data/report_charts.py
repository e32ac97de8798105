"""The charts of a report as SVG, drawn by Vega-Lite. Colours are CSS variables, so that a page is light or dark as its reader is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import vl_convert

from batchllm.data.report import Latency, Rows

_WIDTH, _HEIGHT = 640, 150
_COLOURS = ["var(--first)", "var(--second)", "var(--third)"]
_TEXT = {"labelColor": "currentColor", "titleColor": "currentColor", "labelFont": "inherit", "titleFont": "inherit"}
_CONFIG = {
    "background": None,
    "view": {"stroke": None},
    "axis": {**_TEXT, "gridColor": "var(--grid)", "domainColor": "currentColor", "tickColor": "currentColor"},
    "legend": {**_TEXT, "orient": "top", "title": None, "symbolType": "stroke", "symbolStrokeWidth": 3},
}


def curve_chart(rows: Rows, series: Sequence[tuple[str, str]], *, unit: str) -> str:
    """Lines over time. `rows` have `second` and a column for each of `series`: (column, label)."""
    values = [
        {"second": row["second"], "value": row[column], "series": label} for row in rows for column, label in series
    ]
    labels = [label for _, label in series]
    return _svg(
        {
            "data": {"values": values},
            "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 1.5},
            "encoding": {
                "x": _axis("second", "seconds since the start"),
                "y": _axis("value", unit),
                "color": {
                    "field": "series",
                    "type": "nominal",
                    "scale": {"domain": labels, "range": _COLOURS[: len(labels)]},
                    **({} if len(labels) > 1 else {"legend": None}),
                },
            },
        }
    )


def tier_chart(rows: Rows) -> str:
    """Bytes held by each tier over time; `rows` have `second`, `tier`, `used_bytes`."""
    tiers = sorted({str(row["tier"]) for row in rows})
    values = [{**row, "mib": row["used_bytes"] / 2**20} for row in rows]
    return _svg(
        {
            "data": {"values": values},
            "mark": {"type": "line", "interpolate": "step-after", "strokeWidth": 1.5},
            "encoding": {
                "x": _axis("second", "seconds since the start"),
                "y": _axis("mib", "MiB"),
                "color": {
                    "field": "tier",
                    "type": "nominal",
                    "scale": {"domain": tiers, "range": [_COLOURS[number % 3] for number in range(len(tiers))]},
                },
            },
        }
    )


def latency_chart(latency: Latency) -> str:
    """Rows by time; the last bar holds all that took longer."""
    return _svg(
        {
            "data": {"values": latency.bars},
            "mark": {"type": "bar", "color": _COLOURS[0], "stroke": "var(--paper)", "strokeWidth": 1},
            "encoding": {
                "x": {**_axis("low", "seconds"), "bin": {"binned": True}},
                "x2": {"field": "high"},
                "y": _axis("num_rows", "samples"),
            },
        }
    )


def _axis(field: str, title: str) -> dict[str, Any]:
    return {"field": field, "type": "quantitative", "title": title}


def _svg(spec: dict[str, Any]) -> str:
    whole = {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "width": _WIDTH,
        "height": _HEIGHT,
        "config": _CONFIG,
        **spec,
    }
    return vl_convert.vegalite_to_svg(whole)
