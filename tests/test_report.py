"""The HTML report: self-contained, complete, and safe with any name."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html import escape
from pathlib import Path

import numpy as np
import pytest

from analytics.advisor import advise_scale
from analytics.causes import CAUSES
from analytics.diagnosis import QUERIES, diagnose
from kvtide.charts import CAUSE_COLOURS, waterfall_chart
from kvtide.frames import Curve
from kvtide.report import ReportData, render, write_report
from tests.diagnosis_cases import CASES, frame


@pytest.fixture(scope="module")
def data() -> ReportData:
    windows = frame(**CASES["noisy_neighbour"])
    advice = advise_scale(windows)
    assert advice is not None
    edges = np.geomspace(1, 50_000, 200)
    curves = [Curve(tenant, scope, edges, edges / 50_000) for tenant in windows.tenants for scope in ("fleet", "placed")]
    return ReportData(windows, diagnose(windows), curves, [advice], "noisy_neighbour", "a <test> page")


def page_without_plotly(text: str) -> str:
    """The page less its largest script, which is Plotly itself."""
    scripts = re.findall(r"<script[^>]*>.*?</script>", text, re.DOTALL)
    return text.replace(max(scripts, key=len), "")


def charts_of(text: str) -> dict[str, dict[str, object]]:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_page_says_what_was_found(data: ReportData) -> None:
    text = page_without_plotly(render(data))
    for words in (
        "<h1>noisy_neighbour</h1>",
        '<b class="good">noisy_neighbour</b>',
        "a &lt;test&gt; page",
        "95 % interval",
        "kvtide sql --named",
    ):
        assert words in text
    assert all(escape(line) in text for line in data.diagnosis.evidence)
    assert all(name in text for name in (*QUERIES, *data.frame.tenants, data.advice[0].kind))


def test_every_chart_has_its_place_and_data(data: ReportData) -> None:
    text = render(data)
    charts = charts_of(text)
    assert set(charts) == {"series", "causes", "waterfall", "tenant0", "tenant1", "tenant2"}
    assert all(f'<div id="{name}"></div>' in text and charts[name]["data"] for name in charts)
    names = {trace["name"] for trace in charts["causes"]["data"]}  # type: ignore[attr-defined]
    assert "capacity_other" in names and "hit" not in names
    assert text.count("</script>") == 3


def test_nothing_is_fetched(data: ReportData) -> None:
    text = page_without_plotly(render(data))
    assert not re.search(r"""(src|href)\s*=|url\(|@import|https?://""", text)
    assert "default-src 'none'" in text


def test_a_wrong_verdict_is_shown_as_wrong_and_names_are_escaped(data: ReportData) -> None:
    evil = "<script>alert(1)</script>"
    tenants = (evil, *data.frame.tenants[1:])
    windows = replace(data.frame, tenants=tenants)
    curves = [replace(curve, tenant=evil) if curve.tenant == "chat" else curve for curve in data.curves]
    text = page_without_plotly(render(ReportData(windows, diagnose(windows), curves, injected="capacity_pressure")))
    assert evil not in text and '<b class="bad">capacity_pressure</b>' in text and "No advice." in text


def test_quiet_fleet_and_missing_curves(tmp_path: Path) -> None:
    windows = frame()
    path = write_report(tmp_path / "new" / "page.html", ReportData(windows, diagnose(windows)))
    text = page_without_plotly(path.read_text(encoding="utf-8"))
    assert 'class="verdict quiet"' in text and "No stack distances are stored" in text


def test_waterfall_ends_at_the_ratio_after(data: ReportData) -> None:
    bars = waterfall_chart(data.diagnosis).data[0]
    assert sum(bars.x[:-1]) == pytest.approx(bars.x[-1], abs=0.01)
    assert bars.y[0] == "before" and bars.y[-1] == "after"


def test_every_cause_has_a_colour() -> None:
    assert set(CAUSE_COLOURS) == set(CAUSES) - {"hit"} and len(set(CAUSE_COLOURS.values())) == len(CAUSE_COLOURS)
