"""The plots of a characterisation, once as data, drawn two ways: Plotly figures for the page, small SVG pictures for documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import plotly.graph_objects as go

from kvtide.charts import BLUE, GREEN, GREY, ORANGE

COLOURS = (BLUE, ORANGE, GREEN, GREY)
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _RIGHT = 360, 224, 44, 38, 40, 12


@dataclass(frozen=True)
class Panel:
    """One plot: `x` are numbers of a line, or labels of bars; `series` holds y values by name, all on one axis from 0."""

    name: str
    title: str
    x_title: str
    y_title: str
    x: Sequence[float] | Sequence[str]
    series: dict[str, list[float]]
    log_x: bool = False

    @property
    def bars(self) -> bool:
        """Whether x are labels."""
        return bool(self.x) and isinstance(self.x[0], str)


def panels(found: dict[str, Any]) -> list[Panel]:
    """The plots that a characterisation has data for."""
    made = (_arrivals(found), _capacity(found), _reuse_times(found), _positions(found), _skew(found), _categories(found))
    return [panel for panel in made if panel is not None]


def _arrivals(found: dict[str, Any]) -> Panel | None:
    if not found["arrivals"] or not found["arrivals"]["series"]:
        return None
    rows = found["arrivals"]["series"]
    width = rows[1]["from_s"] - rows[0]["from_s"]
    rate = [row["requests"] / width for row in rows]
    return Panel("arrivals", "Arrivals", "minutes", "requests/s", [row["from_s"] / 60 for row in rows], {"requests/s": rate})


def _capacity(found: dict[str, Any]) -> Panel | None:
    if not found["capacity"]:
        return None
    rows = found["capacity"]["curve"]
    series = {kind: [100 * row[f"hit_{kind}_ratio"] for row in rows] for kind in ("blocks", "tokens")}
    sizes = [float(row["capacity_blocks"]) for row in rows]
    return Panel("capacity", "Hit ratio against capacity (LRU, leaf first)", "capacity, blocks", "hit ratio, %", sizes, series, log_x=True)


def _reuse_times(found: dict[str, Any]) -> Panel | None:
    if not found["reuse_time"] or found["reuse_time"]["p50_s"] is None:
        return None
    rows = found["reuse_time"]["histogram"]
    shares = [100 * row["reuses_ratio"] for row in rows]
    return Panel("reuse_time", "Time until a block is reused", "", "share of reuses, %", [r["label"] for r in rows], {"reuses": shares})


def _positions(found: dict[str, Any]) -> Panel | None:
    if not found["position"]:
        return None
    rows = found["position"]
    series = {
        name: [100 * (row[key] or 0.0) for row in rows]
        for name, key in (("hit ratio there", "hit_blocks_ratio"), ("share of all hits", "share_of_hits_ratio"))
    }
    return Panel("position", "Reuse by position in the prompt", "blocks before it", "%", [row["label"] for row in rows], series)


def _skew(found: dict[str, Any]) -> Panel | None:
    if not found["skew"] or found["skew"]["reuses_of_top_1pct_blocks_ratio"] is None:
        return None
    rows = found["skew"]["by_top_blocks"]
    shares = [100 * row["reuses_ratio"] for row in rows]
    return Panel(
        "skew", "Reuses that the most reused blocks carry", "", "share of reuses, %", [r["label"] for r in rows], {"reuses": shares}
    )


def _categories(found: dict[str, Any]) -> Panel | None:
    if not found["categories"]:
        return None
    rows = found["categories"][:12]
    shares = [100 * (row["reuse_ratio"] or 0.0) for row in rows]
    return Panel("categories", "Touched blocks that come back, by category", "", "%", [row["label"] for row in rows], {"come back": shares})


def figure(panel: Panel) -> go.Figure:
    """The panel as a Plotly figure."""
    drawn = go.Figure()
    for colour, (name, y) in zip(COLOURS, panel.series.items(), strict=False):
        if panel.bars:
            drawn.add_bar(x=list(panel.x), y=y, name=name, marker_color=colour)
        else:
            drawn.add_scatter(x=list(panel.x), y=y, name=name, mode="lines", line={"color": colour, "width": 2.2})
    drawn.update_xaxes(title_text=panel.x_title, type="category" if panel.bars else "log" if panel.log_x else "linear", automargin=True)
    if panel.log_x:
        drawn.update_xaxes(dtick=1, exponentformat="power")
    drawn.update_yaxes(title_text=panel.y_title, rangemode="tozero")
    drawn.update_layout(height=300, showlegend=len(panel.series) > 1, barmode="group", hovermode="x unified")
    return drawn


def svg(drawn: Sequence[Panel], columns: int = 2) -> str:
    """Panels side by side as one SVG picture with a light ground; coordinates have one decimal, so that equal data give equal text."""
    rows = -(-len(drawn) // columns)
    width, height = columns * _WIDTH, rows * _HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="10">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for index, panel in enumerate(drawn):
        parts += [f'<g transform="translate({index % columns * _WIDTH},{index // columns * _HEIGHT})">', *_panel_svg(panel), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel_svg(panel: Panel) -> list[str]:
    top = max((max(y) for y in panel.series.values()), default=0.0) or 1.0
    step = _step(top)
    top = step * np.ceil(top / step - 1e-9)
    right, floor = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [_text(_LEFT, 14, panel.title, "start", "bold"), _text(_LEFT - 34, 28, panel.y_title, "start", fill="#5d6878")]
    for value in np.arange(0, top + step / 2, step):
        y = floor - (floor - _TOP) * value / top
        parts += [f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#dde2e8"/>', _text(_LEFT - 4, y + 3, f"{value:g}", "end")]
    parts += _bars(panel, top, right, floor) if panel.bars else _lines(panel, top, right, floor)
    for k, (name, colour) in enumerate(zip(panel.series, COLOURS, strict=False)):
        if len(panel.series) > 1:
            x, anchor = (right - 4, "end") if panel.bars else (_LEFT + 6, "start")
            parts.append(_text(x, _TOP + 10 + 12 * k, name, anchor, fill=colour))
    return [*parts, _text((_LEFT + right) / 2, _HEIGHT - 4, panel.x_title, "middle")]


def _lines(panel: Panel, top: float, right: int, floor: int) -> list[str]:
    x = np.array(panel.x, np.float64)
    at = np.log10(x) if panel.log_x else x
    lo, hi = float(at.min()), float(at.max())
    place = _LEFT + (right - _LEFT) * (at - lo) / ((hi - lo) or 1.0)
    parts = []
    for colour, y in zip(COLOURS, panel.series.values(), strict=False):
        points = " ".join(f"{a:.1f},{floor - (floor - _TOP) * b / top:.1f}" for a, b in zip(place, y, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
    whole = np.arange(np.ceil(lo), np.floor(hi) + 1)
    marks = whole if panel.log_x else np.arange(0, hi + 1e-9, _step(hi or 1.0))
    for mark in marks:
        text = f"{10**mark:,.0f}" if panel.log_x else f"{mark:g}"
        parts.append(_text(_LEFT + (right - _LEFT) * (mark - lo) / ((hi - lo) or 1.0), floor + 12, text, "middle"))
    return parts


def _bars(panel: Panel, top: float, right: int, floor: int) -> list[str]:
    slot = (right - _LEFT) / len(panel.x)
    wide = 0.8 * slot / len(panel.series)
    parts = []
    for k, (colour, y) in enumerate(zip(COLOURS, panel.series.values(), strict=False)):
        for i, value in enumerate(y):
            tall = (floor - _TOP) * value / top
            x = _LEFT + i * slot + 0.1 * slot + k * wide
            parts.append(f'<rect x="{x:.1f}" y="{floor - tall:.1f}" width="{wide:.1f}" height="{tall:.1f}" fill="{colour}"/>')
    for i, label in enumerate(map(str, panel.x)):
        x, low = _LEFT + (i + 0.5) * slot, floor + 8
        parts.append(
            f'<text x="{x:.1f}" y="{low}" text-anchor="end" font-size="7" transform="rotate(-35 {x:.1f} {low})">{escape(label)}</text>'
        )
    return parts


def _step(top: float) -> float:
    """A round distance between about five grid lines."""
    rough = top / 5
    power = 10.0 ** np.floor(np.log10(rough))
    return float(next(power * m for m in (1, 2, 5, 10) if power * m >= rough))


def _text(x: float, y: float, text: str, anchor: str, weight: str = "normal", fill: str = "#1c2430") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}" fill="{fill}">{escape(text)}</text>'
