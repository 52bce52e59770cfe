"""`kvtide analyze`: its page, its rows in the store, odd inputs, and docs/workloads.md beside what the command finds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analytics.workload import flatten
from ingest.chaining import chain_hashes, mix64
from ingest.sources import SOURCES, TraceRequest
from ingest.store import Store
from kvtide.workload_docs import DOCUMENT, ROWS, TRACES, analyse, column, detail, picture, read_detail, read_table, updated
from kvtide.workload_input import _unmix64, contents, load
from kvtide.workload_panels import Panel, figure, svg
from kvtide.workload_report import profile_rows, render_workload, shown
from tests.test_analyze_mrc import answer, kvtide, mooncake, row

FOLDER = Path(__file__).parents[1] / ".." / "shared" / "traces"
SLOW = {"weka"}


def chat(rows: int = 40) -> list[dict[str, Any]]:
    """Qwen rows: chats of two turns with a shared head of one block."""
    out = []
    for k in range(rows):
        turn = k % 2 + 1
        ids = [7, 100 + k // 2] + ([200 + k] if turn == 2 else [])
        out.append(
            {
                "chat_id": k,
                "parent_chat_id": k - 1 if turn == 2 else -1,
                "timestamp": float(k),
                "input_length": 16 * len(ids),
                "output_length": 3,
                "type": "text" if k % 4 < 2 else "search",
                "turn": turn,
                "hash_ids": ids,
            }
        )
    return out


# ---------------------------------------------------------------- the command


def test_characterisation_stands_in_the_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = mooncake(tmp_path / "t.jsonl", chat())
    assert kvtide(monkeypatch, "analyze", path, "-f", "qwen", "--json", "--prefill-cost", "1,0") == 0
    result = answer(capsys)
    found = result["characterisation"]
    assert found["ideal"]["hit_blocks_ratio"] == result["ideal_hit_ratio"]["blocks"] == (39 + 20) / 100
    assert found["ideal"]["hit_prefill_cost_ratio"] == pytest.approx(result["ideal_hit_ratio"]["tokens"])
    assert found["turns"]["turns_max"] == 2 and found["turns"]["next_turn_after_first_ratio"] == 1
    # Second turns find their session's two blocks; first turns the head, from another session.
    assert found["session_sharing"]["within_session_hits_ratio"] == 40 / 59
    assert {row["label"] for row in found["categories"]} == {"text/1", "text/2", "search/1", "search/2"}
    assert found["templates"]["heads"][0]["length_tokens"] == 16 and found["templates"]["heads"][0]["conversations_ratio"] == 1
    assert found["any_position"]["any_position_blocks_ratio"] == found["any_position"]["prefix_blocks_ratio"] == 59 / 100
    assert found["tenants"] == [] and found["unknown"]["tenant_sharing"]


def test_tenants_are_characterised_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = mooncake(tmp_path / "t.jsonl", chat(400))
    assert kvtide(monkeypatch, "analyze", path, "-f", "qwen", "--json", "--assign-tenants", "zipf:3") == 0
    result = answer(capsys)
    apart = {part["tenant"]: part for part in result["characterisation"]["tenants"]}
    for tenant in result["tenants"]:
        mine = apart[tenant["tenant"]]
        assert mine["ideal"]["hit_blocks_ratio"] == tenant["ideal_hit_ratio"]["blocks"]
        assert mine["capacity"]["distinct_blocks"] == tenant["distinct_blocks"]
        assert mine["arrivals"]["requests"] == tenant["requests"]
    sharing = result["characterisation"]["tenant_sharing"]
    # The head is computed once a tenant instead of once: two hits of the shared cache are another tenant's.
    total = round(result["ideal_hit_ratio"]["blocks"] * result["blocks"])
    assert sharing["cross_tenant_hits_ratio"] == pytest.approx(2 / (total + 2)) and sharing["assigned"] is True


@pytest.mark.parametrize("text", ["", "1", "a,b", "-1,1", "0,0", "1,inf", "nan,1"])
def test_prefill_cost_is_checked(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = mooncake(tmp_path / "t.jsonl", [row(0, 512, [1])])
    assert kvtide(monkeypatch, "analyze", path, "-f", "mooncake", "--prefill-cost", text) == 2
    assert "seconds per token" in capsys.readouterr().err


# ---------------------------------------------------------------- odd inputs


def test_unsorted_trace_is_sorted_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(1000 * k, 1536, [1, 10 + k // 3, 100 + k]) for k in range(30)]
    shuffled = [rows[k] for k in np.random.default_rng(1).permutation(30)]
    results = []
    for name, some in (("a.jsonl", rows), ("b.jsonl", shuffled)):
        assert kvtide(monkeypatch, "analyze", mooncake(tmp_path / name, some), "-f", "mooncake", "--json") == 0
        results.append(answer(capsys))
    assert results[0].pop("unsorted_requests") == 0 < results[1].pop("unsorted_requests")
    assert {**results[0], "trace": ""} == {**results[1], "trace": ""}


def test_a_cut_trace_is_told_and_what_is_left_is_characterised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cut.jsonl"
    whole = "".join(json.dumps(row(k, 1024, [1, k + 2])) + "\n" for k in range(20))
    path.write_text(whole[:-25])
    assert kvtide(monkeypatch, "analyze", str(path), "-f", "mooncake", "--json") == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["characterisation"]["ideal"]["hit_blocks_ratio"] == 18 / 38 and f"{path}:20: truncated" in err


def test_an_empty_trace_is_an_error_and_writes_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = mooncake(tmp_path / "empty.jsonl", []), tmp_path / "page.html"
    assert kvtide(monkeypatch, "analyze", path, "-f", "mooncake", "--report", str(page)) == 2
    assert "empty.jsonl" in capsys.readouterr().err and not page.exists()


def test_looping_one_block_and_single_request_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = {
        "loop": ([row(k, 512, [k % 5]) for k in range(50)], 45 / 50),
        "inside": ([row(k, 2048, [1, 2, 1, 2]) for k in range(3)], 8 / 12),
        "one": ([row(0, 100, [9])], 0.0),
        "blockless": ([row(0, 0, []), row(5, 0, [])], None),
    }
    for name, (rows, ideal) in cases.items():
        assert kvtide(monkeypatch, "analyze", mooncake(tmp_path / name, rows), "-f", "mooncake", "--json") == 0
        result = answer(capsys)
        assert result["ideal_hit_ratio"]["blocks"] == ideal, name
        found = result["characterisation"]
        assert (found["ideal"] or {"hit_blocks_ratio": None})["hit_blocks_ratio"] == ideal, name
        assert all(m.value is not None or found["unknown"] for m in flatten({k: v for k, v in found.items() if k != "tenants"}))
    assert "no block hashes" in found["unknown"]["ideal"]


def test_blocks_of_several_sizes_keep_their_tokens() -> None:
    chain = np.array([1, 2, 3], np.uint64)
    requests = [
        TraceRequest(arrived_at_s=0, prompt_tokens=48, output_tokens=None, block_size=16, chain=chain),
        TraceRequest(arrived_at_s=1, prompt_tokens=90, output_tokens=None, block_size=32, chain=chain + np.uint64(10)),
        TraceRequest(arrived_at_s=2, prompt_tokens=90, output_tokens=None, block_size=32, chain=chain + np.uint64(10)),
    ]
    held = load(requests, SOURCES["dynamo"])
    tokens = held.labelled.chains.block_tokens
    assert held.block_size is None and tokens is not None and tokens.tolist() == [16, 16, 16, 32, 32, 26, 32, 32, 26]


def test_contents_undo_the_chaining_of_readers() -> None:
    rng = np.random.default_rng(3)
    values = rng.integers(0, 1 << 64, 1000, dtype=np.uint64)
    assert np.array_equal(_unmix64(mix64(values)), values)
    ids = [rng.integers(0, 6, length).astype(np.uint64) for length in (5, 0, 1, 40)]
    requests = [
        TraceRequest(arrived_at_s=k, prompt_tokens=16 * one.size, output_tokens=1, block_size=16, chain=chain_hashes(one))
        for k, one in enumerate(ids)
    ]
    held = load(requests, SOURCES["qwen"]).labelled
    assert held.content is not None and np.array_equal(held.content, contents(held.chains))
    by_id = dict(zip(np.concatenate(ids).tolist(), held.content.tolist(), strict=True))
    assert len(set(by_id.values())) == len(by_id) == 6
    assert held.content.tolist() == [by_id[i] for i in np.concatenate(ids).tolist()]


# ---------------------------------------------------------------- page and pictures


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    path = mooncake(tmp_path / "t.jsonl", chat(200))
    assert kvtide(monkeypatch, "analyze", path, "-f", "qwen", "--json", "--assign-tenants", "zipf:2") == 0
    return answer(capsys)


def test_page_is_whole_fetches_nothing_and_escapes(
    tmp_path: Path, result: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "<script>alert(1)</script>"
    result["tenants"][0]["tenant"] = evil
    result["characterisation"]["categories"][0]["label"] = evil
    text = render_workload(result)
    scripts = re.findall(r"<script[^>]*>.*?</script>", text, re.DOTALL)
    plain = text.replace(max(scripts, key=len), "")
    assert not re.search(r"""(src|href)\s*=|url\(|@import|https?://""", plain) and "default-src 'none'" in plain
    assert evil not in plain and "&lt;script&gt;alert(1)" in plain
    charts = json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)[1])  # type: ignore[index]
    assert set(charts) == {f"chart_{name}" for name in ("arrivals", "capacity", "reuse_time", "position", "skew", "categories")}
    assert all(f'<div id="{name}"></div>' in text and charts[name]["data"] for name in charts)
    for words in ("Templates", "Who serves whom: tenants", "What this trace cannot tell", "tenants are assigned, not observed"):
        assert words in plain
    path = mooncake(tmp_path / "t2.jsonl", chat())
    assert kvtide(monkeypatch, "analyze", path, "-f", "qwen", "--report", str(tmp_path / "new" / "page.html")) == 0
    assert "Sessions and turns" in (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    assert "page.html" in capsys.readouterr().err


def test_page_of_a_load_only_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.csv"
    lines = "".join(f"2023-11-16 18:15:{k:02d}.5,{100 + k},7\n" for k in range(30))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + lines)
    assert kvtide(monkeypatch, "analyze", str(path), "-f", "azure", "--json") == 0
    text = render_workload(answer(capsys))
    assert "the trace has no block hashes" in text and "<h2>Capacity</h2>" not in text and 'id="chart_arrivals"' in text


def test_svg_draws_every_point_and_is_deterministic() -> None:
    line = Panel("l", "a <b>", "x", "y", [1.0, 10.0, 100.0], {"one": [0.0, 5.0, 10.0], "two": [1.0, 1.0, 1.0]}, log_x=True)
    bars = Panel("b", "bars", "x", "y", ["p", "q"], {"one": [1.0, 3.0]})
    text = svg([line, bars])
    assert text == svg([line, bars]) and text.count("<polyline") == 2 and "a &lt;b&gt;" in text
    points = re.findall(r'points="([^"]*)"', text)[0].split()
    x, y = zip(*(map(float, point.split(",")) for point in points), strict=True)
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2) and y[0] - y[1] == pytest.approx(y[1] - y[2], abs=0.2)
    tall = [float(h) for h in re.findall(r'height="([\d.]+)" fill="#3b82c4"', text)]
    assert tall[1] / tall[0] == pytest.approx(3, abs=0.05)
    assert list(figure(bars).data[0].y) == [1.0, 3.0] and figure(line).layout.xaxis.type == "log"


def test_figures_for_people() -> None:
    assert [shown(value, name) for value, name in ((None, ""), (0.123, "x_ratio"), (0.00042, "x_ratio"), (0.0, "x_ratio"))] == [
        "-", "12.3 %", "0.042 %", "0.0 %"]  # fmt: skip
    assert [shown(value) for value in (12031, 3.25, 12.0, 1234.5, True, "text")] == ["12,031", "3.25", "12", "1,234", "True", "text"]


def test_rows_name_metric_label_value_unit_and_reason(result: dict[str, Any]) -> None:
    rows = list(profile_rows(result))
    by_key = {(tenant, metric, label): (value, unit, reason) for tenant, metric, label, value, unit, reason in rows}
    assert len(by_key) == len(rows)
    assert by_key["", "ideal.hit_blocks_ratio", ""] == (result["ideal_hit_ratio"]["blocks"], "ratio", "")
    assert by_key["", "categories.p50_s", "text/1"][1] == "s"
    tenants = {tenant for tenant, *_ in by_key}
    assert tenants == {"", "tenant-01", "tenant-02"}
    assert by_key["tenant-01", "tenant_sharing", ""][0] is None and "one tenant" in by_key["tenant-01", "tenant_sharing", ""][2]
    assert all((value is None) == bool(reason) for value, _, reason in by_key.values())


def test_rows_reach_the_store(store_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = mooncake(tmp_path / "t.jsonl", chat())
    for _ in range(2):
        assert kvtide(monkeypatch, "analyze", path, "-f", "qwen", "--json", "--store", store_url) == 0
        result = answer(capsys)
    expected = {(metric, label): (value, unit, reason) for _, metric, label, value, unit, reason in profile_rows(result)}
    with Store.open(store_url) as store:
        found = store.rows("SELECT * FROM workload_profile WHERE id = (SELECT argMax(id, made_at) FROM workload_profile)")
        analyses = store.rows("SELECT uniqExact(id) AS n, count() AS rows FROM workload_profile")[0]
    assert {(row["metric"], row["label"]): (row["value"], row["unit"], row["reason"]) for row in found} == expected
    assert {(row["trace"], row["format"], row["tenant"]) for row in found} == {(path, "qwen", "")}
    assert analyses == {"n": 2, "rows": 2 * len(expected)}


# ---------------------------------------------------------------- docs/workloads.md


@pytest.mark.traces
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in TRACES])
def test_document_equals_what_analyze_finds(name: str) -> None:
    if not (FOLDER / TRACES[name][0]).exists():
        pytest.skip(f"{FOLDER / TRACES[name][0]} is absent")
    result = analyse(FOLDER, name)
    text = DOCUMENT.read_text(encoding="utf-8")
    assert read_table(text)[name] == column(result)
    assert read_detail(text, name) == detail(result).strip()
    assert (DOCUMENT.parent / "workloads" / f"{name}.svg").read_text(encoding="utf-8") == picture(result)
    assert updated(text, name, result) == text


@pytest.mark.traces
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("conversation", {"blocks touched once": 75.9, "top block, of references": 4.17, "ideal hit ratio, blocks": 36.64,
                          "ideal, tokens": 37.36, "LRU hit at 10 % of distinct": 27.8}),
        ("synthetic", {"blocks touched once": 58.5, "top block, of references": 0.02, "ideal hit ratio, blocks": 63.96,
                       "ideal, tokens": 65.12, "LRU hit at 10 % of distinct": 26.0}),
        ("ragpulse", {"ideal hit ratio, blocks": 17.96, "ideal, tokens": 31.53, "tokens seen at any position": 72.0}),
    ],
)  # fmt: skip
def test_known_answers_of_the_public_traces(name: str, expected: dict[str, float]) -> None:
    """An independent computation, to one unit of its last digit; the LRU figures are another project's, forward order: 0.3 points."""
    if not (FOLDER / TRACES[name][0]).exists():
        pytest.skip(f"{FOLDER / TRACES[name][0]} is absent")
    known = {row.metric: row.value for row in flatten(analyse(FOLDER, name)["characterisation"]) if not row.label}
    for label, value in expected.items():
        found = 100 * (known[ROWS[label]] or 0.0)
        digits = len(str(value).partition(".")[2])
        assert abs(found - value) <= (0.3 if label.startswith("LRU") else 10**-digits), (label, found)


def test_every_documented_trace_has_its_marks_and_picture() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert set(read_table(text)) == set(TRACES)
    for name in TRACES:
        assert f"<!-- {name} -->" in text and f"<!-- end {name} -->" in text and f"](workloads/{name}.svg)" in text
        assert (DOCUMENT.parent / "workloads" / f"{name}.svg").read_text(encoding="utf-8").startswith("<svg")
