"""Where a characterisation goes: one self-contained HTML page, and rows of table `workload_profile`."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import plotly.graph_objects as go
import pyarrow as pa
from plotly.offline import get_plotlyjs

from analytics.workload import flatten
from ingest.store import Store
from kvtide.report_page import PAGE
from kvtide.workload_panels import figure, panels

# The page's head (style) and tail (script) are the diagnosis report's.
_HEAD, _TAIL = PAGE.partition("<main>")[0] + "<main>", "</main>" + PAGE.partition("</main>")[2]
_BODY = """<section class="head">$headline</section>
$sections
<section><h2>What this trace cannot tell</h2><div class="scroll">$unknown</div>
<p class="note">Assumed: $assumptions</p></section>
<script type="application/json" id="profile">$profile</script>
"""

# Words of each theme: heading and one line about it.
THEMES: dict[str, tuple[str, str]] = {
    "arrivals": ("Arrivals", "Index of dispersion: variance / mean of the requests in windows of that length; 1 for a Poisson process."),
    "ideal": ("Ideal hit ratio", "What an infinite cache would serve as leading runs, tenants apart, from input blocks only."),
    "capacity": ("Capacity", "Blocks that an LRU prefix cache needs to come near to the ideal; distinct = of all distinct blocks."),
    "reuse_time": ("Reuse time", "From one touch of a block to the next, over all reuses."),
    "categories": ("Categories", "By type and turn of the request that touched a block last, with an exponential fit of the reuse times."),
    "position": ("Position", "Where in the prompt hits lie: blocks that stand before."),
    "skew": ("Skew", "Part of the reuses that the most reused blocks carry; share of requests that get, or give, 90 % of the hits."),
    "one_touch": ("Touched once", "Blocks that only one request ever asked for, and the most wanted block."),
    "lifespan": ("Lifespan", "From a block's first to its last touch; over all blocks and over those that were reused."),
    "turns": ("Sessions and turns", "Single-turn sessions have one request; hit_blocks is the hit ratio of their requests."),
    "session_sharing": ("Who serves whom: sessions", "Hits that a request's own session, its conversation, or only another could serve."),
    "tenant_sharing": ("Who serves whom: tenants", "What isolation costs: hits that only another tenant's block could serve."),
    "templates": ("Templates", "Shared heads: the longest prefixes that at least 1 % of the conversations (or requests) begin with."),
    "any_position": ("Beyond prefixes", "Content seen before at any position, beside what a prefix cache can serve."),
}  # fmt: skip
# Which plot stands under which theme; lists that a plot shows whole are not printed as tables.
_PLOTTED = ("arrivals.series", "capacity.curve", "reuse_time.histogram", "skew.by_top_blocks")


def write_workload_report(path: str | Path, result: dict[str, Any]) -> Path:
    """Write the page of an analysis (the document of `kvtide analyze --json`) and return its path; folders are made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(render_workload(result), encoding="utf-8")
    return target


def render_workload(result: dict[str, Any]) -> str:
    """The page as text: load, every theme that the trace tells of with its plot, and what it cannot tell. Nothing is fetched."""
    found = result["characterisation"]
    charts: dict[str, go.Figure] = {f"chart_{panel.name}": figure(panel) for panel in panels(found)}
    sections = "".join(_section(name, found[name], charts) for name in THEMES if found[name] is not None)
    reasons = "".join(f"<tr><td>{escape(_words(name))}</td><td>{escape(why)}</td></tr>" for name, why in found["unknown"].items())
    return Template(_HEAD + _BODY + _TAIL).substitute(
        title=escape(f"kvtide analyze: {result['trace']}"),
        headline=_headline(result),
        sections=sections + _tenants(result),
        unknown=f"<table><tr><th>figure<th>why not</tr>{reasons}</table>" if reasons else "<p>Nothing: it told everything.</p>",
        assumptions=escape("; ".join(found["assumptions"])),
        profile=_script_json(result),
        charts=_script_json({name: json.loads(str(chart.to_json())) for name, chart in charts.items()}),
        plotly=get_plotlyjs(),
    )


def store_profile(url: str, result: dict[str, Any]) -> str:
    """`save_profile` into the store at `url`; tables are made where missing."""
    with Store.open(url, create=True) as store:
        store.migrate()
        return save_profile(store, result)


def save_profile(store: Store, result: dict[str, Any]) -> str:
    """Write an analysis to `workload_profile`, of the whole trace and of each tenant; returns its id."""
    made_at_us = time.time_ns() // 1000
    rows = list(profile_rows(result))
    id_ = hashlib.sha256(json.dumps([made_at_us, rows]).encode()).hexdigest()[:16]
    columns = ("tenant", "metric", "label", "value", "unit", "reason")
    table: dict[str, Any] = {name: [row[k] for row in rows] for k, name in enumerate(columns)}
    table["value"] = pa.array(table["value"], pa.float64())
    same = {"id": id_, "trace": result["trace"], "format": result["format"]}
    table |= {name: [value] * len(rows) for name, value in same.items()}
    table["made_at"] = pa.array([made_at_us] * len(rows), pa.timestamp("us", "UTC"))
    store.insert("workload_profile", pa.table(table), f"workload_profile:{id_}")
    return id_


def profile_rows(result: dict[str, Any]) -> Iterator[tuple[str, str, str, float | None, str, str]]:
    """(tenant, metric, label, value, unit, reason) of every figure; tenant '' is the whole trace, reason '' where there is a value."""
    whole = result["characterisation"]
    for tenant, found in [("", whole), *((part["tenant"], part) for part in whole["tenants"])]:
        unknown = found["unknown"]
        for metric in flatten({name: value for name, value in found.items() if name not in ("tenant", "tenants")}):
            reason = unknown.get(metric.metric) or unknown.get(metric.metric.partition(".")[0], "")
            yield tenant, metric.metric, metric.label, metric.value, metric.unit, "" if metric.value is not None else reason


def _headline(result: dict[str, Any]) -> str:
    best = result["ideal_hit_ratio"] or {}
    facts = {
        "requests": shown(result["requests"]),
        "blocks / distinct": f"{shown(result['blocks'])} / {shown(result['distinct_blocks'])}" if best else "-",
        "tokens a block": shown(result["block_size"]),
        "mean prompt / output, tokens": f"{shown(result['mean_prompt_tokens'])} / {shown(result['mean_output_tokens'])}",
        "span": "-" if result["span_s"] is None else f"{result['span_s'] / 60:,.1f} min",
        "ideal hit ratio, blocks / tokens": " / ".join(shown(best.get(kind), "ratio") for kind in ("blocks", "tokens")),
        "lines not read": shown(result["bad_records"]),
    }
    shown_facts = "".join(f'<div class="fact"><span>{escape(name)}</span><b>{escape(value)}</b></div>' for name, value in facts.items())
    name = result["trace"].rsplit("/", 1)[-1]
    return (
        f'<div class="verdict"><span>workload &middot; {escape(result["format"])}</span><h1>{escape(name)}</h1></div>'
        f'<div class="facts">{shown_facts}</div>'
    )


def _section(name: str, found: Any, charts: dict[str, go.Figure]) -> str:
    heading, note = THEMES[name]
    chart = f'<div id="chart_{name}"></div>' if f"chart_{name}" in charts else ""
    return f'<section><h2>{heading}</h2><p class="note">{note}</p>{chart}<div class="scroll">{_table(name, found)}</div></section>'


def _table(name: str, found: Any) -> str:
    """Single figures side by side, then one table for each list of rows."""
    if isinstance(found, list):
        return _rows_table(found)
    single = {key: value for key, value in found.items() if not isinstance(value, list)}
    facts = "".join(
        f'<div class="fact"><span>{escape(_words(key))}</span><b>{escape(shown(value, key))}</b></div>' for key, value in single.items()
    )
    lists = [value for key, value in found.items() if isinstance(value, list) and value and f"{name}.{key}" not in _PLOTTED]
    return f'<div class="facts">{facts}</div>' + "".join(map(_rows_table, lists))


def _rows_table(rows: list[dict[str, Any]]) -> str:
    keys = [key for key in rows[0] if key != "label" and not key.startswith("from_")]
    head = "".join(f"<th class=n>{escape(_words(key))}" for key in keys)
    body = "".join(
        f"<tr><td>{escape(str(row['label']))}</td>" + "".join(f"<td class=n>{escape(shown(row[key], key))}</td>" for key in keys) + "</tr>"
        for row in rows
    )
    return f"<table><tr><th>{head}</tr>{body}</table>"


def _tenants(result: dict[str, Any]) -> str:
    if len(result["tenants"]) == 1:
        return ""
    rows = [
        {"label": row["tenant"] + (" (assigned)" if row["assigned"] else "")}
        | {key: row[key] for key in ("requests", "blocks", "distinct_blocks", "prompt_tokens")}
        | {f"ideal_{kind}_ratio": (row["ideal_hit_ratio"] or {}).get(kind) for kind in ("blocks", "tokens")}
        for row in result["tenants"]
    ]
    note = '<p class="note">Tenants share no block: the same hash under two tenants is two blocks.</p>'
    return f'<section><h2>Tenants</h2>{note}<div class="scroll">{_rows_table(rows)}</div></section>'


def shown(value: Any, name: str = "") -> str:
    """A figure for people: ratios as per cent, seconds and counts with separators; - for None."""
    if value is None:
        return "-"
    if isinstance(value, bool | str):
        return str(value)
    if name.endswith("ratio"):
        return f"{100 * value:.1f} %" if value == 0 or abs(value) >= 0.001 else f"{100 * value:.2g} %"
    if isinstance(value, int) or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.3g}"


def _words(name: str) -> str:
    """A key as words: `hit_blocks_ratio` is hit blocks, seconds say so."""
    words = name.replace(".", ": ").removesuffix("_ratio").replace("pct", " %")
    return f"{words[:-2]}, s".replace("_", " ") if words.endswith("_s") else words.replace("_", " ")


def _script_json(value: Any) -> str:
    return json.dumps(value).replace("</", "<\\/")
