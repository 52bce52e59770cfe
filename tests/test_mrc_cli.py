"""`kvtide mrc`: weights, bands, plots and the comparison, on traces whose curve is known by hand."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analytics.curve import WEIGHTS, Curve, Weight
from analytics.estimators import ESTIMATORS, SAMPLED
from kvtide.curves import Weighing, collect, compare, counting, distinct_blocks, spaced, timed, with_defaults
from kvtide.mrcplot import GIB, Line, Plot, capacities_drawn, figure, gib_ticks, picture
from kvtide.tracefiles import TraceInput
from tests.test_analyze_mrc import answer, kvtide, mooncake, row, trace

WITHOUT_MATPLOTLIB = importlib.util.find_spec("matplotlib") is None
Run = Callable[..., dict[str, Any]]


@pytest.fixture
def sessions(tmp_path: Path) -> str:
    """400 prompts of 4 to 8 blocks in 60 conversations with one head, drawn once."""
    rng = np.random.default_rng(7)
    rows = []
    for i in range(400):
        conversation, length = int(rng.integers(0, 60)), int(rng.integers(4, 9))
        rows.append(row(i * 100, 512 * length, [1, *(100 * conversation + 100 + block for block in range(length - 1))]))
    return mooncake(tmp_path / "sessions.jsonl", rows)


@pytest.fixture
def run(sessions: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def call(*words: str) -> dict[str, Any]:
        assert kvtide(monkeypatch, "mrc", sessions, "-f", "mooncake", "--json", *words) == 0
        return answer(capsys)

    return call


# ---------------------------------------------------------------- weights


def test_every_weight_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The second prompt finds the first one's block: 512 of 512 + 1100 tokens, and the cheap ones among them."""
    path = mooncake(tmp_path / "t.jsonl", [row(0, 512, [1]), row(1, 1100, [1, 2, 3])])
    words = ("mrc", path, "-f", "mooncake", "--capacities", "1,2", "--prefill-cost", "0.5,0.25")
    assert kvtide(monkeypatch, *words, "--weight", "cost", "--json") == 0
    result = answer(capsys)

    def seconds(end: int) -> float:
        return 0.5 * end + 0.25 * end * end / 2

    cost = seconds(512) / (seconds(512) + seconds(1100))
    assert result["hit_ratio_blocks"] == [0.25, 0.25] and result["hit_ratio_tokens"] == [512 / 1612] * 2
    assert result["hit_ratio_cost"] == [pytest.approx(cost, rel=1e-12)] * 2
    assert result["ideal"] == {"blocks": 0.25, "tokens": 512 / 1612, "cost": pytest.approx(cost, rel=1e-12)}
    assert result["weight"] == "cost" and result["prefill_cost"] == {"a_s": 0.5, "b_s": 0.25}
    for weight, shown in (("blocks", "0.2500"), ("tokens", f"{512 / 1612:.4f}"), ("cost", f"{cost:.4f}")):
        assert kvtide(monkeypatch, *words, "--weight", weight) == 0
        out = capsys.readouterr().out
        assert f"hit ratio in {weight}" in out and out.count(shown) == 3


def test_cost_without_context_is_tokens(run: Run) -> None:
    result = run("--weight", "cost", "--prefill-cost", "3,0")
    assert result["hit_ratio_cost"] == pytest.approx(result["hit_ratio_tokens"], rel=1e-12)
    deep = run("--weight", "cost", "--prefill-cost", "0,1")
    assert all(a < b for a, b in zip(deep["hit_ratio_cost"], deep["hit_ratio_tokens"], strict=True))  # heads hit, and are cheap


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), *[st.integers(0, 9)] * 3), max_size=20), st.sampled_from(WEIGHTS), st.integers(0, 60))
def test_counting_moves_a_weight_into_the_blocks(steps: list[tuple[int, int, int, int]], weight: Weight, capacity: int) -> None:
    distances = np.array(sorted({step[0] for step in steps}), np.float64)
    hits = [np.cumsum([float(step[k]) for step in steps[: distances.size]]) for k in (1, 2, 3)]
    curve = Curve(distances, hits[0], hits[1], hits[2], 200.0, 300.0, 400.0)
    by = Weighing(weight, (2.0, 0.5))
    assert counting(curve, by).hit_ratio([capacity])[0] == by.ratio(curve, [capacity])[0]
    assert counting(curve, by).ideal_ratio() == curve.ideal_ratio(weight, by.cost)


def test_bins_are_points_and_block_bytes_give_gib(run: Run, sessions: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    result = run("--bins", "7", "--block-bytes", str(1 << 29))
    assert result["capacities"] == run("--points", "7")["capacities"] and 2 < len(result["capacities"]) <= 7
    assert result["capacities_gib"] == [size / 2 for size in result["capacities"]] and result["block_bytes"] == 1 << 29
    assert kvtide(monkeypatch, "mrc", sessions, "-f", "mooncake", "--capacities", "10,400", "--block-bytes", str(1 << 29)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["capacity_blocks", "GiB", "hit_ratio"] in lines
    assert [line[:2] for line in lines if line and line[0] in ("10", "400")] == [["10", "5"], ["400", "200"]]


def test_knee_and_cliff_of_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Forty blocks in turn: nothing until all of them fit, so never above the chord, and no knee."""
    path = mooncake(tmp_path / "loop.jsonl", [row(i, 512, [1000 + i % 40]) for i in range(400)])
    assert kvtide(monkeypatch, "mrc", path, "-f", "mooncake", "--json", "--capacities", "39,40") == 0
    result = answer(capsys)
    assert result["hit_ratio_blocks"] == [0.0, 0.9] and result["knee_blocks"] == 0
    assert result["cliffs"] == [{"start_blocks": 0.0, "end_blocks": 40.0, "gap_ratio": pytest.approx(0.9 * 39 / 40)}]
    assert kvtide(monkeypatch, "mrc", path, "-f", "mooncake", "--capacities", "39,40") == 0
    out = capsys.readouterr().out
    assert "knee at" not in out and "cliff from 0 to 40 blocks: up to 87.8 points below" in out


# ---------------------------------------------------------------- bands


@pytest.mark.parametrize("name", sorted(SAMPLED))
@pytest.mark.parametrize("weight", WEIGHTS)
def test_bands_of_sampled_estimators(run: Run, name: str, weight: str) -> None:
    given = {"shards_fixed": ("-p", "s_max=120"), "lashards": ("-p", "keys=60", "-p", "rate_min=0.4")}.get(name, ("-p", "rate=0.4"))
    result = run("--estimator", name, *given, "--weight", weight, "--capacities", "20,100,200,300")
    band, ratio = result["band"], result[f"hit_ratio_{weight}"]
    assert band["level"] == 0.95 and band["shards"] == 32
    assert band["low"][0] is None is band["high"][0]  # 20 blocks: 8 of the sample
    assert all(0 <= low <= at <= high <= 1 for low, at, high in zip(band["low"][2:], ratio[2:], band["high"][2:], strict=True))
    assert band["high"][2] > band["low"][2]
    assert run("--estimator", name, *given, "--no-band")["band"] is None


def test_a_sample_of_everything_is_sure(run: Run) -> None:
    result = run("--estimator", "shards", "-p", "rate=1", "--capacities", "60,200")
    assert result["band"]["low"] == result["band"]["high"] == result["hit_ratio_blocks"]
    assert run("--estimator", "aet")["band"] is None and run()["band"] is None


# ---------------------------------------------------------------- comparison


def test_compare_measures_against_the_exact_curve(run: Run, sessions: str) -> None:
    result = run("--compare", "olken,shards,aet", "--weight", "tokens", "--estimator", "shards", "-p", "rate=0.3")["compare"]
    held = collect(TraceInput((sessions,), "mooncake", None, None, None, False, False).requests())
    exact, sampled = ESTIMATORS["olken"](held.chains), ESTIMATORS["shards"](held.chains, rate=0.3)
    grid = spaced(exact, 40)
    assert result["capacities"] == grid and result["weight"] == "tokens"
    off = np.abs(exact.hit_ratio(grid, "tokens") - sampled.hit_ratio(grid, "tokens"))
    rows = {each["estimator"]: each for each in result["estimators"]}
    assert list(rows) == ["run_exact", "olken", "shards", "aet"]  # the exact one always, in the registry's order
    for name in ("run_exact", "olken"):
        assert (rows[name]["mean_error"], rows[name]["max_error"], rows[name]["kind"]) == (0.0, 0.0, "exact")
    assert rows["shards"]["parameters"] == with_defaults("shards", {"rate": 0.3}) and off.max() > 0
    assert (rows["shards"]["mean_error"], rows["shards"]["max_error"]) == pytest.approx((off.mean(), off.max()), rel=1e-12)
    assert rows["shards"]["max_error_at_blocks"] == grid[int(off.argmax())]
    assert rows["run_exact"]["speed_ratio"] == 1.0
    for each in rows.values():
        whole = rows["run_exact"]["blocks_per_second"] * each["speed_ratio"]
        assert each["blocks_per_second"] == pytest.approx(whole, rel=1e-9) and each["failed"] is None


def test_compare_alone_takes_every_estimator(run: Run) -> None:
    rows = run("--compare")["compare"]["estimators"]
    assert [each["estimator"] for each in rows] == list(ESTIMATORS)
    assert {each["policy"] for each in rows} == {"lru", "lfu"} and all(each["failed"] is None for each in rows)


def test_an_estimator_that_refuses_fails_by_itself(sessions: str) -> None:
    chains = collect(TraceInput((sessions,), "mooncake", None, None, None, False, False).requests()).pool()
    told: list[str] = []
    wanted = {"run_exact": {}, "shards": {"rate": 2.0}, "olken": {}}
    _, rows = compare(chains, wanted, timed(partial(ESTIMATORS["run_exact"]), chains), Weighing("blocks", (1.0, 0.0)), told.append)
    assert told == list(wanted) and [row.failed for row in rows] == [None, rows[1].failed, None]
    assert rows[1].failed and "at most 1" in rows[1].failed and np.isnan(rows[1].mean_error)


def test_everything_printed_fits_100_columns(sessions: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["mrc", sessions, "-f", "mooncake", "--assign-tenants", "zipf:17", "--block-bytes", "1e6"]
    assert (
        kvtide(monkeypatch, *words, "--compare", "run_exact,kosmo,shards", "--points", "5", "--weight", "cost", "--estimator", "shards")
        == 0
    )
    out, err = capsys.readouterr()
    first, *lines = out.splitlines()
    assert first.startswith(sessions) and err == ""  # a bar is for terminals
    assert max(map(len, lines)) <= 100
    assert sum("capacity_blocks" in line for line in lines) >= 3 and "continued" in out
    assert all(f"tenant-{i:02d}" in out for i in range(1, 18)) and "tenants were assigned by kvtide" in out
    assert "note: kosmo went block by block in forward order" in out


def test_a_terminal_gets_a_bar_that_names_what_is_measured(
    sessions: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert kvtide(monkeypatch, "mrc", sessions, "-f", "mooncake", "--compare", "olken", "--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["compare"] and "comparing" in err and "olken" in err


# ---------------------------------------------------------------- plots


def drawn(path: Path) -> dict[str, Any]:
    """The figure inside a page; that the page asks nothing of the network."""
    text = path.read_text(encoding="utf-8")
    assert "default-src 'none'" in text and not re.search(r"<(?:script|link|img|iframe)[^>]+(?:src|href)=", text)
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found
    made: dict[str, Any] = json.loads(found[1].replace("<\\/", "</"))
    return made


def test_html_plot_of_tenants_and_their_pool(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "new" / "curve.html"
    words = ("--assign-tenants", "zipf:3", "--weight", "tokens", "--block-bytes", str(1 << 25), "--plot", str(path))
    result = run(*words)
    assert result["plot"] == str(path)
    made = drawn(path)
    names = [line["name"] for line in made["data"] if line.get("name")]
    assert names[:4] == ["pool", *(f"tenant-0{i} (assigned)" for i in (1, 2, 3))] and f"knee, {result['knee_blocks']:,} blocks" in names
    layout = made["layout"]
    assert layout["xaxis"]["title"]["text"] == "capacity, blocks of 512 tokens"
    assert layout["yaxis"]["title"]["text"] == "hit ratio, % of prompt tokens"
    assert layout["xaxis2"]["title"]["text"] == "capacity, GiB" and layout["xaxis2"]["matches"] == "x"
    assert [note["text"] for note in layout["annotations"]] == [f"infinite cache {100 * result['ideal']['tokens']:.1f} %"]
    assert "xaxis2" not in drawn_without_bytes(run, tmp_path)["layout"]


def drawn_without_bytes(run: Run, tmp_path: Path) -> dict[str, Any]:
    run("--plot", str(tmp_path / "plain.html"))
    return drawn(tmp_path / "plain.html")


def test_plot_of_a_sampled_estimator_has_its_band_and_those_compared(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "b.html"
    run("--estimator", "shards_hot", "-p", "rate=0.5", "-p", "hot=8", "--compare", "run_exact,aet", "--plot", str(path))
    names = [line["name"] for line in drawn(path)["data"] if line.get("name")]
    assert names[:4] == ["shards_hot, 95 % band", "shards_hot", "run_exact", "aet"]
    run("--estimator", "shards_hot", "--no-band", "--plot", str(path))
    assert "band" not in str([line.get("name") for line in drawn(path)["data"]])


def plot(**changes: Any) -> Plot:
    at = np.array(capacities_drawn(5000), np.float64)
    ratio = np.minimum(at / 5000, 1.0) * 0.5
    lines = [Line("pool", at, ratio, np.where(at > 50, ratio * 0.9, np.nan), np.where(at > 50, ratio * 1.1, np.nan)), Line("x", at, ratio)]
    given: dict[str, Any] = {"title": "t.jsonl: $x_1", "weight": "cost", "block_size": 16, "lines": lines, "ideal": 0.5}
    return Plot(**{**given, "knee": (700.0, 0.07), "cliffs": [(0.0, 90.0)], "block_bytes": float(1 << 26), **changes})


@pytest.mark.skipif(WITHOUT_MATPLOTLIB, reason="matplotlib is not installed")
def test_png_has_both_axes_and_all_marks(run: Run, tmp_path: Path) -> None:
    axes = picture(plot()).axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("capacity, blocks of 16 tokens", "hit ratio, % of prefill seconds")
    assert axes.get_xscale() == "log" and [above.get_xlabel() for above in axes.child_axes] == ["capacity, GiB"]
    labels = [text.get_text() for text in picture(plot()).legends[0].get_texts()]
    assert labels == ["pool, 95 % band", "pool", "x", "cliff", "knee, 700 blocks"]
    assert picture(plot(block_bytes=None)).axes[0].child_axes == []
    path = tmp_path / "new" / "curve.PNG"
    run("--assign-tenants", "zipf:3", "--plot", str(path), "--block-bytes", "1e6")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 10_000


def test_png_without_matplotlib_says_so(sessions: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert kvtide(monkeypatch, "mrc", sessions, "-f", "mooncake", "--plot", "x.png") == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_html_is_safe_with_any_name() -> None:
    text = str(figure(plot(lines=[Line("</script><b>", np.array([1.0, 2.0]), np.array([0.1, 0.2]))], knee=None, cliffs=[])).to_json())
    assert json.loads(text)["data"][0]["name"] == "</script><b>"


@given(st.floats(1e-3, 1e13), st.floats(1, 1e4), st.floats(1.5, 1e9))
def test_gib_ticks_stand_where_they_say(block_bytes: float, low: float, factor: float) -> None:
    ends = (low, low * factor)
    places, texts = gib_ticks(ends, block_bytes)
    for place, text in zip(places, texts, strict=True):
        assert ends[0] * (1 - 1e-9) <= place <= ends[1] * (1 + 1e-9)
        assert float(text.replace(",", "")) * GIB / block_bytes == pytest.approx(place, rel=1e-6)
    assert len(places) >= 1 or factor < 10


# ---------------------------------------------------------------- usage


@pytest.mark.parametrize(
    ("words", "reasons"),
    [
        (("--plot", "curve.svg"), (".png", ".html")),
        (("--plot", "curve"), (".png", ".html")),
        (("--plot", "/proc/none/curve.html"), ("cannot be written",)),
        (("--compare", "guess"), ("no estimator", "run_exact", "behind PATH")),
        (("--compare", "shards,"), ("no estimator",)),
        (("--weight", "cost", "--prefill-cost", "1"), ("seconds per token and per token squared",)),
        (("--weight", "cost", "--prefill-cost", "1,-1"), ("seconds per token and per token squared",)),
        (("--weight", "cost", "--prefill-cost", "0,0"), ("seconds per token and per token squared",)),
        (("--weight", "cost", "--prefill-cost", "a,b"), ("seconds per token and per token squared",)),
        (("--block-bytes", "0"), ("block-bytes",)),
        (("--band",), ("run_exact draws no sample", "shards_hot")),
        (("--estimator", "minisim", "-p", "policy=best"), ("policy 'best' is unknown", "lru")),
        (("--bins", "1"), ("bins",)),
    ],
)
def test_bad_usage_says_what_would_do(
    words: tuple[str, ...], reasons: tuple[str, ...], sessions: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kvtide(monkeypatch, "mrc", sessions, "-f", "mooncake", *words) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err and all(reason in err for reason in reasons)


def test_compare_before_the_path_says_where_it_belongs(sessions: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert kvtide(monkeypatch, "mrc", "-f", "mooncake", sessions, "--compare", sessions) == 2
    assert "write --compare behind PATH" in capsys.readouterr().err


def test_examples_of_the_help_run(
    sessions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kvtide(monkeypatch, "mrc", "--help") == 0
    examples = [line.split()[1:] for line in capsys.readouterr().out.splitlines() if line.strip().startswith("kvtide mrc")]
    assert len(examples) >= 3
    monkeypatch.chdir(tmp_path)
    for words in examples:
        assert kvtide(monkeypatch, *(sessions if word == "trace.jsonl" else word for word in words)) == 0, words
    assert (tmp_path / "curve.html").exists()


# ---------------------------------------------------------------- public traces


@pytest.mark.traces
def test_compare_on_mooncake(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = trace("mooncake/conversation_trace.jsonl.zst")
    assert kvtide(monkeypatch, "mrc", path, "-f", "mooncake", "--compare", "olken,aet", "--weight", "cost", "--json") == 0
    compared = answer(capsys)["compare"]
    grid = compared["capacities"]
    assert (grid[0], grid[-1], len(grid)) == (183, 182790, 40)
    rows = {each["estimator"]: each for each in compared["estimators"]}
    assert rows["olken"]["max_error"] == 0.0 and 0 < rows["aet"]["mean_error"] <= 0.002


@pytest.mark.traces
def test_sampled_curve_of_mooncake_has_about_its_distinct_blocks() -> None:
    requests = TraceInput((trace("mooncake/conversation_trace.jsonl.zst"),), "mooncake", None, None, None, False, False).requests()
    chains = collect(requests).pool()
    assert distinct_blocks(ESTIMATORS["run_exact"](chains)) == 182_790
    assert distinct_blocks(ESTIMATORS["shards_hot"](chains, rate=0.1)) == pytest.approx(182_790, rel=0.03)
