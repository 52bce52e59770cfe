"""One self-contained HTML page: what fell, why, what to do, and the SQL to check it. Plotly is inlined once; nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

import sql
from analytics.advisor import Advice
from analytics.diagnosis import Diagnosis, TenantChange
from analytics.frame import Frame, Span
from ingest.store import Store
from kvtide.charts import causes_chart, series_chart, tenant_chart, times, waterfall_chart
from kvtide.frames import Curve, load_curves
from kvtide.report_page import PAGE

MAX_TENANTS = 12


@dataclass(frozen=True)
class ReportData:
    """All that the page shows. `curves` should cover the diagnosis' current stretch; `injected` is the true cause, where it is known."""

    frame: Frame
    diagnosis: Diagnosis
    curves: Sequence[Curve] = ()
    advice: Sequence[Advice] = ()
    injected: str | None = None
    title: str = "kvtide report"


def report_data(
    store: Store, frame: Frame, diagnosis: Diagnosis, advice: Sequence[Advice], *, injected: str | None = None, title: str = "kvtide report"
) -> ReportData:
    """The page's data, with the curves of the current stretch read from the store."""
    return ReportData(frame, diagnosis, load_curves(store, diagnosis.current), advice, injected, title)


def write_report(path: str | Path, data: ReportData) -> Path:
    """Write the page and return its path; folders are made. Size: Plotly's 4.8 MB and the data."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(render(data), encoding="utf-8")
    return target


def render(data: ReportData) -> str:
    """The page as text."""
    charts: dict[str, go.Figure] = {
        "series": series_chart(data.frame, data.diagnosis),
        "causes": causes_chart(data.frame),
        "waterfall": waterfall_chart(data.diagnosis),
    }
    tenants = _largest(data.diagnosis)
    capacity = _capacity(data)
    for index, tenant in enumerate(tenants):
        curves = [curve for curve in data.curves if curve.tenant == tenant.tenant]
        if curves:
            charts[f"tenant{index}"] = tenant_chart(curves, capacity, tenant.hit_ratio_after)
    return Template(PAGE).substitute(
        title=escape(data.title),
        headline=_headline(data),
        evidence="".join(f"<li>{escape(line)}</li>" for line in data.diagnosis.evidence),
        groups=_groups(data.diagnosis),
        tenants=_tenant_table(data.diagnosis),
        curves=_curve_cards(tenants, charts, capacity),
        advice=_advice(data.advice),
        queries=_queries(data.diagnosis),
        charts=json.dumps({name: json.loads(str(figure.to_json())) for name, figure in charts.items()}).replace("</", "<\\/"),
        plotly=get_plotlyjs(),
    )


def _headline(data: ReportData) -> str:
    found = data.diagnosis
    if data.injected is None:
        truth = ""
    else:
        mark = "good" if data.injected == found.verdict else "bad"
        truth = f'<div class="fact"><span>injected cause</span><b class="{mark}">{escape(data.injected)}</b></div>'
    target = f'<div class="fact"><span>behind it</span><b>{escape(found.target)}</b></div>' if found.target else ""
    scope = f"tenant {escape(found.tenant)}" if found.tenant else "fleet"
    kind = "quiet" if found.verdict == "none" else "alarm"
    change = f"{found.change_points:+.1f} points <small>[{found.change_low:+.1f}, {found.change_high:+.1f}]</small>"
    load = "flat" if found.load.flat else f"requests {100 * found.load.requests:+.0f} %, tokens {100 * found.load.prompt_tokens:+.0f} %"
    onset = _clock(found.onset_s) if found.onset_s is not None else "none found"
    title = f"{escape(data.title)} &middot; verdict ({scope})"
    return f"""<div class="verdict {kind}"><span>{title}</span><h1>{escape(found.verdict)}</h1></div>
<div class="facts">
<div class="fact"><span>hit ratio</span><b>{100 * found.hit_ratio_before:.1f} % &rarr; {100 * found.hit_ratio_after:.1f} %</b></div>
<div class="fact"><span>change</span><b>{change}</b></div>
{truth}{target}
<div class="fact"><span>onset (UTC)</span><b>{onset}</b></div>
<div class="fact"><span>load</span><b>{load}</b></div>
</div>"""


def _groups(found: Diagnosis) -> str:
    rows = [group for group in found.groups if abs(group.points) >= 0.05]
    body = "".join(
        f"<tr><td>{escape(g.verdict)}</td><td class=n>{g.points:+.2f}</td><td class=n>{g.low:+.2f} &hellip; {g.high:+.2f}</td>"
        f"<td>{escape(g.target)}</td></tr>"
        for g in rows
    )
    return f"<table><tr><th>verdict<th class=n>points<th class=n>95 % interval<th>carried by</tr>{body}</table>" if rows else ""


def _tenant_table(found: Diagnosis) -> str:
    body = "".join(
        f"<tr><td>{escape(t.tenant)}</td><td class=n>{100 * t.share_before:.1f} &rarr; {100 * t.share_after:.1f}</td>"
        f"<td class=n>{100 * t.hit_ratio_before:.1f} &rarr; {100 * t.hit_ratio_after:.1f}</td>"
        f"<td class=n>{sum(t.contributions.values()):+.2f}</td><td>{escape(_main_cause(t))}</td></tr>"
        for t in found.tenants
    )
    head = "<tr><th>tenant<th class=n>share of tokens, %<th class=n>hit ratio, %<th class=n>points of the fleet<th>mostly</tr>"
    return f"<table>{head}{body}</table>"


def _main_cause(tenant: TenantChange) -> str:
    cause, points = max(tenant.contributions.items(), key=lambda item: abs(item[1]))
    return f"{cause} {points:+.1f}" if abs(points) >= 0.05 else ""


def _largest(found: Diagnosis) -> list[TenantChange]:
    return sorted(found.tenants, key=lambda t: -(t.share_before + t.share_after))[:MAX_TENANTS]


def _capacity(data: ReportData) -> float:
    """Blocks of the fleet in the current stretch: the mean over its windows."""
    mask = data.frame.mask(data.diagnosis.current)
    return float(data.frame.fleet.capacity_blocks[mask].sum(axis=1).mean()) if mask.any() else 0.0


def _curve_cards(tenants: Sequence[TenantChange], charts: dict[str, go.Figure], capacity: float) -> str:
    cards = []
    for index, tenant in enumerate(tenants):
        if f"tenant{index}" not in charts:
            continue
        change = f"{100 * tenant.hit_ratio_before:.1f} % &rarr; {100 * tenant.hit_ratio_after:.1f} %"
        cards.append(f'<div class="card"><h3>{escape(tenant.tenant)} <small>{change}</small></h3><div id="tenant{index}"></div></div>')
    if not cards:
        return "<p>No stack distances are stored for this stretch.</p>"
    note = f"Grey line: capacity of the fleet, {capacity:,.0f} blocks. Green line: hit ratio observed now." if capacity else ""
    return f'<p class="note">{note}</p><div class="grid">{"".join(cards)}</div>'


def _advice(advice: Sequence[Advice]) -> str:
    if not advice:
        return "<p>No advice.</p>"
    rows = []
    for item in advice:
        why = "".join(f"<li>{escape(line)}</li>" for line in item.evidence)
        rows.append(
            f"<tr><td><b>{escape(item.kind)}</b></td><td>{escape(item.target)}</td><td class=predicted>{_predicted(item)}</td>"
            f'<td class=n title="confidence">{item.confidence:.2f}</td><td title="holds until">{_clock(item.expires_at_s)}</td>'
            f"<td><details><summary>{escape(item.evidence[0] if item.evidence else 'why')}</summary><ul>{why}</ul></details></td></tr>"
        )
    head = "<tr><th>what<th>target<th>predicted<th class=n>confidence<th>holds until (UTC)<th>why</tr>"
    return f"<table>{head}{''.join(rows)}</table>"


def _predicted(item: Advice) -> str:
    """The predicted figures that people ask for, as now -> then."""
    lines = []
    for key, label, scale, unit in (
        ("hit_ratio", "hit", 100.0, " %"),
        ("prefill_load", "prefill load", 1.0, ""),
        ("ttft_mean_s", "TTFT", 1.0, " s"),
        ("ttft_p99_s", "TTFT p99", 1.0, " s"),
    ):
        if key in item.predicted and f"{key}_now" in item.predicted:
            now, then = (_number(scale * item.predicted[name]) for name in (f"{key}_now", key))
            lines.append(f"{label} {now} &rarr; {then}{unit}" if now != then else f"{label} {now}{unit}")
    return "<br>".join(lines)


def _number(value: float) -> str:
    return (f"{value:.1f}" if value >= 10 else f"{value:.2f}") if np.isfinite(value) else "&infin;"


def _queries(found: Diagnosis) -> str:
    known, span = sql.queries(), Span(found.baseline.from_s, found.current.to_s)
    bounds = dict(zip(("from", "to"), times(np.array(span)), strict=True))
    blocks = []
    for name in found.queries:
        query = known[name]
        params = "".join(f" --param {key}='{value}'" for key, value in bounds.items() if key in query.types)
        text = f"kvtide sql --named {name}{params}\n\n{query.text}"
        blocks.append(f"<details><summary><code>{escape(name)}</code> {escape(query.title)}</summary><pre>{escape(text)}</pre></details>")
    return "".join(blocks)


def _clock(seconds: float) -> str:
    return times(np.array([seconds]))[0]
