"""The report's charts as plain Plotly figures; colours of paper, text and grid are set by the page, which knows light from dark."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from analytics.diagnosis import Diagnosis
from analytics.evidence import cause_series
from analytics.frame import Floats, Frame
from kvtide.frames import Curve

BLUE, ORANGE, GREY, RED, GREEN = "#3b82c4", "#e08a3c", "#8a93a0", "#d1495b", "#3f9c6d"
CAUSE_COLOURS: dict[str, str] = {
    "granularity": "#a9b1bc",
    "unobserved": "#6f7a87",
    "routing": "#3b82c4",
    "broken_prefix": "#74b3e3",
    "in_flight": "#2f5f94",
    "not_stored": "#8c6bb1",
    "instance": "#e6b422",
    "capacity_self": "#f0a868",
    "capacity_other": "#d1495b",
    "capacity_resize": "#9c2f4a",
    "cold": "#3f9c6d",
    "beyond": "#87c5a4",
}


def times(seconds: Floats) -> list[str]:
    """Plotly's own time format, UTC."""
    return [datetime.fromtimestamp(float(t), UTC).strftime("%Y-%m-%d %H:%M:%S") for t in seconds]


def series_chart(frame: Frame, diagnosis: Diagnosis) -> go.Figure:
    """Hit ratio by minute with onset and the stretches compared; below it the load, both measures as a share of the baseline."""
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.66, 0.34], vertical_spacing=0.07)
    x = times(frame.window_s)
    figure.add_scatter(x=x, y=_gaps(100 * frame.hit_ratio()), name="hit ratio", line={"color": BLUE, "width": 2.5}, row=1, col=1)
    base = frame.mask(diagnosis.baseline)
    for name, values, colour in (
        ("requests", frame.requests.sum(axis=1), ORANGE),
        ("prompt tokens", frame.prompt_tokens.sum(axis=1), GREY),
    ):
        level = float(np.median(values[base])) or 1.0
        figure.add_scatter(x=x, y=(100 * values / level).tolist(), name=name, line={"color": colour, "width": 1.8}, row=2, col=1)
    for span, colour, label in ((diagnosis.baseline, GREEN, "baseline"), (diagnosis.current, RED, "current")):
        left, right = times(np.array(span))
        figure.add_vrect(x0=left, x1=right, fillcolor=colour, opacity=0.1, line_width=0, row=1, col=1)
        figure.add_annotation(
            x=left, y=1.0, yref="y domain", text=label, showarrow=False, xanchor="left", yanchor="bottom", font_color=colour
        )
    if diagnosis.onset_s is not None:
        onset = times(np.array([diagnosis.onset_s]))[0]
        figure.add_shape(type="line", x0=onset, x1=onset, y0=0, y1=1, yref="paper", line={"color": RED, "dash": "dot", "width": 1.5})
    figure.update_yaxes(title_text="hit ratio, %", row=1, col=1)
    figure.update_yaxes(title_text="load, %", rangemode="tozero", row=2, col=1)
    figure.update_layout(height=430, hovermode="x unified")
    return figure


def causes_chart(frame: Frame) -> go.Figure:
    """Where the prompt tokens that missed went, stacked by minute, as a share of all prompt tokens."""
    figure = go.Figure()
    x = times(frame.window_s)
    for cause, share in cause_series(frame).items():
        if cause != "hit" and share.max(initial=0.0) >= 0.0005:
            colour = CAUSE_COLOURS[cause]
            style = {"line": {"width": 0.5, "color": colour}, "fillcolor": colour, "hovertemplate": "%{y:.2f} %"}
            figure.add_scatter(x=x, y=(100 * share).tolist(), name=cause, stackgroup="misses", mode="lines", **style)
    figure.update_yaxes(title_text="share of prompt tokens, %", rangemode="tozero")
    figure.update_layout(height=380, hovermode="x unified")
    return figure


def waterfall_chart(diagnosis: Diagnosis) -> go.Figure:
    """From the hit ratio before to the one after, one step per cause; steps below 0.05 points are drawn together."""
    large = {cause: points for cause, points in diagnosis.contributions.items() if abs(points) >= 0.05}
    rest = sum(points for cause, points in diagnosis.contributions.items() if cause not in large)
    steps = sorted(large.items(), key=lambda item: item[1]) + ([("all others", rest)] if abs(rest) >= 0.005 else [])
    before, after = 100 * diagnosis.hit_ratio_before, 100 * diagnosis.hit_ratio_after
    levels = np.cumsum([before, *(points for _, points in steps)])
    figure = go.Figure(
        go.Waterfall(
            orientation="h",
            y=["before", *(cause for cause, _ in steps), "after"],
            x=[before, *(points for _, points in steps), after],
            measure=["absolute", *("relative" for _ in steps), "total"],
            text=[f"{before:.1f} %", *(f"{points:+.1f}" for _, points in steps), f"{after:.1f} %"],
            textposition="outside",
            cliponaxis=False,
            decreasing={"marker": {"color": RED}},
            increasing={"marker": {"color": GREEN}},
            totals={"marker": {"color": BLUE}},
            connector={"line": {"width": 1, "color": GREY}},
        )
    )
    low, high = min(levels.min(), after), max(levels.max(), after)
    room = max(2.0, 0.18 * (high - low))
    figure.update_xaxes(title_text="hit ratio, %", range=[max(0.0, low - room), high + room])
    figure.update_yaxes(autorange="reversed", automargin=True)
    figure.update_layout(height=max(260, 70 + 34 * (len(steps) + 2)), showlegend=False)
    return figure


def tenant_chart(curves: Sequence[Curve], capacity_blocks: float, observed: float) -> go.Figure:
    """One tenant's hit ratio against capacity, fleet and placed, with the fleet's capacity and the observed hit ratio marked."""
    figure = go.Figure()
    style: dict[str, dict[str, Any]] = {"fleet": {"color": BLUE, "width": 2.2}, "placed": {"color": ORANGE, "width": 2.2, "dash": "dash"}}
    for curve in curves:
        keep = _thinned(curve.hit_ratio)
        edges, ratio = np.maximum(curve.capacity_blocks[keep], 1.0), 100 * curve.hit_ratio[keep]
        end = max(capacity_blocks * 2.0, float(edges[-1]) if edges.size else 1.0)
        x, y = [1.0, *edges.tolist(), end], [0.0, *ratio.tolist(), float(ratio[-1]) if ratio.size else 0.0]
        figure.add_scatter(x=x, y=y, name=curve.scope, mode="lines", line={**style[curve.scope], "shape": "hv"})
    if capacity_blocks > 0:
        figure.add_vline(x=capacity_blocks, line={"color": GREY, "dash": "dot", "width": 1.5})
    figure.add_hline(y=100 * observed, line={"color": GREEN, "dash": "dot", "width": 1.2})
    figure.update_xaxes(type="log", title_text="capacity, blocks", dtick=1, exponentformat="power")
    figure.update_yaxes(range=[0, 102], title_text="hit ratio, %")
    figure.update_layout(height=250, showlegend=False)
    return figure


def _thinned(ratio: Floats, step: float = 0.0005) -> list[int]:
    """Indices of a growing curve at which it has moved visibly, the last one included."""
    kept, last = [], -1.0
    for index, value in enumerate(ratio.tolist()):
        if value - last >= step or index == ratio.size - 1:
            kept.append(index)
            last = value
    return kept


def _gaps(values: Floats) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]
