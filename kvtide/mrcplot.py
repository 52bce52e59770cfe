"""Hit ratio against capacity as a picture: a PNG (matplotlib), or one HTML page that fetches nothing (Plotly)."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from ingest.errors import UsageError

F64 = npt.NDArray[np.float64]

FORMATS = (".png", ".html")
GIB = float(1 << 30)
POINTS = 400
# Told apart by colour-blind readers too (Okabe and Ito), the first for the curve that the plot is about.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a93a0", "#b8a400")
DASHES = ("solid", "dash", "dot")
_GREY, _RED = "#7a8491", "#d1495b"
_SIZE_INCHES, _DPI = (9.6, 5.6), 125


@dataclass(frozen=True)
class Line:
    """One curve: capacities in blocks, rising, and its hit ratio (0 to 1) there; `low` and `high` its band, NaN where there is none."""

    name: str
    capacities: F64
    ratio: F64
    low: F64 | None = None
    high: F64 | None = None


@dataclass(frozen=True)
class Plot:
    """What is drawn: the first line is the one that `knee` (capacity in blocks, ratio) and `cliffs` (from, to in blocks) belong to.

    `ideal` is the first line's hit ratio in an infinite cache, `block_bytes` the KV of one block for an axis in GiB.
    """

    title: str
    weight: str
    block_size: int
    lines: Sequence[Line]
    ideal: float
    knee: tuple[float, float] | None = None
    cliffs: Sequence[tuple[float, float]] = ()
    block_bytes: float | None = None

    @property
    def x_title(self) -> str:
        """Title of the axis in blocks."""
        return f"capacity, blocks of {self.block_size} tokens"

    @property
    def y_title(self) -> str:
        """Title of the axis in per cent."""
        return f"hit ratio, % of {WEIGHED[self.weight]}"

    @property
    def ends(self) -> tuple[float, float]:
        """Least and greatest capacity drawn."""
        return float(min(line.capacities[0] for line in self.lines)), float(max(line.capacities[-1] for line in self.lines))


# What a hit ratio of each weight is a share of.
WEIGHED = {"blocks": "block references", "tokens": "prompt tokens", "cost": "prefill seconds"}


def plot_format(path: str) -> str:
    """Suffix of a plot's file. Raises `UsageError` for one that there is no drawing for, or where what draws it is not installed."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        raise UsageError(f"--plot {path!r} must end in .png or .html")
    if suffix == ".png" and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("a .png needs matplotlib (pip install matplotlib); a .html needs nothing")
    return suffix


def write_plot(path: str, plot: Plot) -> Path:
    """Draw into `path`, by its suffix, and return it; folders are made. Raises `UsageError` as `plot_format` and for an unfit place.

    An HTML page holds Plotly (4.8 MB) and the curves.
    """
    draw = {".png": _write_png, ".html": _write_html}[plot_format(path)]
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        draw(target, plot)
    except OSError as error:
        raise UsageError(f"--plot {path!r} cannot be written: {error.strerror or error}") from error
    return target


def capacities_drawn(largest: float) -> list[int]:
    """Whole capacities at which a curve is read for drawing: log-spaced over four decades to a little above `largest` blocks."""
    end = max(1.25 * largest, 10)
    return [int(size) for size in np.unique(np.geomspace(max(end / 1e4, 1), end, POINTS).round().astype(np.int64))]


def gib_ticks(ends: tuple[float, float], block_bytes: float) -> tuple[list[float], list[str]]:
    """Places (in blocks) and texts of powers of ten, and their halves and fifths where few, between two capacities in GiB."""
    low, high = (end * block_bytes / GIB for end in ends)
    steps: Iterable[float] = (1,) if np.log10(high / low) > 3 else (1, 2, 5)
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    values = [step * 10.0**decade for decade in decades for step in steps]
    shown = [value for value in values if low <= value <= high]
    return [value * GIB / block_bytes for value in shown], [f"{value:,.10g}" if value < 1e6 else f"{value:.0e}" for value in shown]


# ---------------------------------------------------------------- HTML


def figure(plot: Plot) -> go.Figure:
    """The plot as a Plotly figure; the page sets the colours of paper, text and grid."""
    made = go.Figure()
    for i, line in enumerate(plot.lines):
        colour = COLOURS[i % len(COLOURS)]
        for low, high in _banded(line):
            outline = {
                "x": line.capacities,
                "mode": "lines",
                "line": {"width": 0, "shape": "hv"},
                "hoverinfo": "skip",
                "legendgroup": line.name,
            }
            made.add_scatter(y=100 * low, showlegend=False, **outline)
            made.add_scatter(y=100 * high, fill="tonexty", fillcolor=_faded(colour), name=f"{line.name}, 95 % band", **outline)
        style = {"color": colour, "width": 2.6 if i == 0 else 1.7, "shape": "hv", "dash": DASHES[i // len(COLOURS) % len(DASHES)]}
        made.add_scatter(
            x=line.capacities, y=100 * line.ratio, name=line.name, mode="lines", line=style, legendgroup=line.name,
            hovertemplate="%{y:.2f} %",
        )  # fmt: skip
    _mark(made, plot)
    low, high = np.log10(plot.ends)
    made.update_xaxes(type="log", title={"text": plot.x_title, "standoff": 6}, range=[low, high], exponentformat="SI")
    made.update_yaxes(title={"text": plot.y_title, "standoff": 8}, range=[0, 100 * _top(plot)])
    if plot.block_bytes:
        places, texts = gib_ticks(plot.ends, plot.block_bytes)
        # An axis shows only where a trace is on it.
        made.add_scatter(x=list(plot.ends), y=[None, None], xaxis="x2", showlegend=False, hoverinfo="skip")
        above = {
            "overlaying": "x",
            "matches": "x",
            "side": "top",
            "type": "log",
            "showgrid": False,
            "title": {"text": "capacity, GiB", "standoff": 6},
        }
        made.update_layout(xaxis2={**above, "tickmode": "array", "tickvals": places, "ticktext": texts, "range": [low, high]})
    made.update_layout(height=560, hovermode="x unified")
    return made


def _mark(made: go.Figure, plot: Plot) -> None:
    made.add_hline(
        y=100 * plot.ideal, line={"color": _GREY, "dash": "dot", "width": 1.2},
        annotation={"text": f"infinite cache {100 * plot.ideal:.1f} %", "font_color": _GREY, "xanchor": "left", "x": 0.005},
    )  # fmt: skip
    for start, end in plot.cliffs:
        made.add_vrect(x0=max(start, plot.ends[0]), x1=end, fillcolor=_RED, opacity=0.12, line_width=0)
    if plot.cliffs:
        made.add_scatter(x=[None], y=[None], name="cliff", mode="markers", marker={"symbol": "square", "color": _faded(_RED), "size": 11})
    if plot.knee:
        at, ratio = plot.knee
        made.add_scatter(
            x=[at], y=[100 * ratio], name=f"knee, {at:,.0f} blocks", mode="markers", hovertemplate="knee",
            marker={"size": 11, "color": _RED, "symbol": "diamond"},
        )  # fmt: skip


def _banded(line: Line) -> list[tuple[F64, F64]]:
    """The band of a line, if it has one anywhere."""
    return [] if line.low is None or line.high is None or not np.isfinite(line.low).any() else [(line.low, line.high)]


def _faded(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.2)"


def _top(plot: Plot) -> float:
    """Hit ratio at the upper edge: a little above all that is drawn."""
    highest = [plot.ideal, *(float(line.ratio.max(initial=0.0)) for line in plot.lines)]
    highest += [float(np.nanmax(high)) for line in plot.lines for _, high in _banded(line)]
    return min(max(1.08 * max(highest), 0.01), 1.02)


def _write_html(target: Path, plot: Plot) -> None:
    drawn: dict[str, Any] = json.loads(str(figure(plot).to_json()))
    data = json.dumps(drawn).replace("</", "<\\/")
    target.write_text(Template(_PAGE).substitute(title=escape(plot.title), plotly=get_plotlyjs(), data=data), encoding="utf-8")


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:">
<title>$title</title>
<style>
:root { color-scheme: light dark; --paper:#fff; --ink:#1c2430; --line:#dde2e8; }
@media (prefers-color-scheme: dark) { :root { --paper:#12161c; --ink:#e6eaf0; --line:#313a46; } }
body { margin:0 auto; max-width:1200px; padding:16px; background:var(--paper); color:var(--ink);
  font:15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size:20px; margin:0; overflow-wrap:anywhere; }
</style></head><body><h1>$title</h1><div id="curve"></div>
<script>$plotly</script>
<script id="data" type="application/json">$data</script>
<script>
const figure = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function draw() {
  const layout = structuredClone(figure.layout);
  delete layout.template;
  Object.assign(layout, { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", autosize: true,
    font: { color: style("--ink"), size: 13, family: getComputedStyle(document.body).fontFamily },
    margin: { l: 64, r: 16, t: layout.xaxis2 ? 64 : 24, b: 48 }, legend: { orientation: "h", y: -0.16, yanchor: "top", x: 0 },
    hoverlabel: { bgcolor: style("--paper"), font: { color: style("--ink") } } });
  for (const key of Object.keys(layout).filter(k => /^[xy]axis/.test(k)))
    Object.assign(layout[key], { gridcolor: style("--line"), zerolinecolor: style("--line"), linecolor: style("--line") });
  Plotly.react("curve", figure.data, layout, { responsive: true, displaylogo: false });
}
draw();
dark.addEventListener("change", draw);
</script></body></html>
"""


# ---------------------------------------------------------------- PNG


def picture(plot: Plot) -> Any:
    """The plot as a matplotlib figure."""
    made: Any = importlib.import_module("matplotlib.figure").Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
    axes = made.add_subplot()
    styles = {"solid": "-", "dash": "--", "dot": ":"}
    for i, line in enumerate(plot.lines):
        colour, dash = COLOURS[i % len(COLOURS)], styles[DASHES[i // len(COLOURS) % len(DASHES)]]
        for low, high in _banded(line):
            band = {"step": "post", "color": colour, "alpha": 0.2, "linewidth": 0}
            axes.fill_between(line.capacities, 100 * low, 100 * high, label=f"{line.name}, 95 % band", **band)
        axes.step(
            line.capacities, 100 * line.ratio, where="post", label=line.name, color=colour, linewidth=2.2 if i == 0 else 1.4, linestyle=dash
        )
    axes.axhline(100 * plot.ideal, color=_GREY, linestyle=":", linewidth=1.2)
    axes.annotate(
        f"infinite cache {100 * plot.ideal:.1f} %", (0.01, 100 * plot.ideal), xycoords=("axes fraction", "data"), va="bottom", color=_GREY
    )
    for i, (start, end) in enumerate(plot.cliffs):
        axes.axvspan(max(start, plot.ends[0]), end, color=_RED, alpha=0.12, linewidth=0, label="cliff" if i == 0 else None)
    if plot.knee:
        at, ratio = plot.knee
        axes.plot([at], [100 * ratio], "D", color=_RED, markersize=7, label=f"knee, {at:,.0f} blocks", zorder=5)
    axes.set(xscale="log", xlim=plot.ends, ylim=(0, 100 * _top(plot)), xlabel=plot.x_title, ylabel=plot.y_title)
    axes.set_title(plot.title, loc="left", fontsize=11, parse_math=False)
    axes.grid(True, which="major", color="#dde2e8", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter("{x:,.10g}")
    if plot.block_bytes:
        each = plot.block_bytes / GIB
        above = axes.secondary_xaxis("top", functions=(lambda blocks: blocks * each, lambda gib: gib / each))
        above.set_xlabel("capacity, GiB")
        above.xaxis.set_major_formatter("{x:,.10g}")
    made.legend(loc="outside lower left", ncols=4, fontsize=8.5, frameon=False)
    return made


def _write_png(target: Path, plot: Plot) -> None:
    picture(plot).savefig(target, format="png")
