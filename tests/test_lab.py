"""`kvtide lab` and its runner: figures beside curves and hand counts, resumed runs, both cores, and odd traces."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analytics.curve import DistanceHistogram
from analytics.fleet.routers import ROUTERS
from analytics.policies import POLICIES
from analytics.reuse.run_exact import RunStack
from ingest.errors import UsageError
from ingest.store import Store
from kvtide import lab
from kvtide.cli import main
from kvtide.commands.lab import traces_of
from kvtide.lab import Lab, LabTrace, PolicyJob, capacities_of, chosen, fallbacks, lab_trace, tier_rows, wins
from kvtide.workload_input import load

TRACES = Path(__file__).parents[1] / ".." / "shared" / "traces"
COST = (2e-4, 2e-8)


def kvtide(monkeypatch: pytest.MonkeyPatch, place: Path, *words: str) -> int:
    """Run the command line in this process and in `place`; returns its exit code."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "argv", ["kvtide", "lab", *words])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code if isinstance(end.value.code, int) else 0


def rows_of(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return rows


def write(path: Path, chains: list[list[int]], tail: int = 0, at_ms: list[int] | None = None) -> Path:
    """A Mooncake trace, requests a second apart; the last block of each prompt lacks `tail` tokens."""
    times = at_ms or [1000 * i for i in range(len(chains))]
    rows = [
        {"timestamp": at, "input_length": 512 * len(chain) - tail, "output_length": 1, "hash_ids": chain}
        for at, chain in zip(times, chains, strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def held(path: Path, format_: str = "mooncake") -> LabTrace:
    (name, one), *_ = traces_of((str(path),), (format_,), None, False, None)
    return lab_trace(name, load(one.requests(), one.source).labelled)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Heads of two blocks shared by growing sessions, with part of a block at the end."""
    rng = np.random.default_rng(1)
    chains, fresh = [[i % 3, 10 + i % 3, 100 + i] for i in range(20)], iter(range(1000, 9000))
    asked = []
    for _ in range(150):
        chain = chains[rng.integers(0, 20)]
        chain.append(next(fresh))
        asked.append(list(chain))
    return write(tmp_path / "small.jsonl", asked, tail=100)


POLICY_WORDS = ("--format", "mooncake", "--policies", "lru,arc,wa,belady", "--capacities", "0,20,10%", "--processes", "1", "--json")


def test_the_document_has_the_promised_keys(trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvtide(monkeypatch, trace.parent, "policies", trace.name, *POLICY_WORDS) == 0
    rows = rows_of(capsys)
    assert len(rows) == 4 * 3
    keys = ["trace", "policy", "form", "capacity_blocks", "hit_ratio_blocks", "hit_ratio_tokens", "saved_prefill_s"]
    assert all(list(row) == keys for row in rows)
    assert {row["trace"] for row in rows} == {"small"}
    assert all(row["hit_ratio_tokens"] == row["saved_prefill_s"] == 0 for row in rows if row["capacity_blocks"] == 0)


def test_lru_cells_equal_the_curve(trace: Path) -> None:
    """Blocks, tokens (tails counted) and prefill seconds of prefix-safe LRU are those of the exact stack."""
    one = held(trace)
    histogram = DistanceHistogram(512)
    histogram.add(RunStack().touch(one.chains.ts_us, one.chains.offsets, one.chains.hashes), one.chains)
    curve, store = histogram.curve(), Lab(trace.parent / "run")
    path = store.keep(one)
    for capacity in (5, 30, 100):
        (row,) = store.run([PolicyJob(path, one.name, "lru", "prefix", capacity, COST)], 1)
        assert row["hit_ratio_blocks"] == pytest.approx(curve.hit_ratio([capacity])[0])
        assert row["hit_ratio_tokens"] == pytest.approx(curve.hit_ratio([capacity], "tokens")[0])
        total_s = COST[0] * curve.total_tokens + COST[1] * curve.total_token_context
        assert row["saved_prefill_s"] == pytest.approx(total_s * curve.hit_ratio([capacity], "cost", COST)[0])


def test_plain_hits_count_only_as_leading_runs(tmp_path: Path) -> None:
    """FIFO at 3 holds 9, 2 and 8 when [1 2] returns: 1 takes the place of 9, and 2 hits as an object, of no use without 1."""
    one = held(write(tmp_path / "t.jsonl", [[1], [9], [1, 2], [8], [1, 2]]))
    assert np.flatnonzero(POLICIES["fifo"].replay(one.trace, 3, "plain")).tolist() == [2, 6]
    store = Lab(tmp_path / "run")
    (row,) = store.run([PolicyJob(store.keep(one), "t", "fifo", "plain", 3, COST)], 1)
    assert row["hit_ratio_blocks"] == pytest.approx(1 / 7)


def test_a_run_that_was_cut_goes_on(trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    kvtide(monkeypatch, trace.parent, "policies", trace.name, *POLICY_WORDS)
    first = rows_of(capsys)
    finished = trace.parent / ".kvtide" / "lab" / "cells.jsonl"
    lines = finished.read_text().splitlines()
    finished.write_text("\n".join(lines[:5]) + "\n" + lines[5][:20])
    ran: list[str] = []
    run = PolicyJob.run

    def counted(job: PolicyJob) -> list[dict[str, Any]]:
        ran.append(job.policy)
        return run(job)

    monkeypatch.setattr(PolicyJob, "run", counted)
    kvtide(monkeypatch, trace.parent, "policies", trace.name, *POLICY_WORDS)
    captured = capsys.readouterr()
    assert json.loads(captured.out)["rows"] == first
    assert len(ran) == 12 - 5 and "5 of 12 cells were finished before" in captured.err
    kvtide(monkeypatch, trace.parent, "policies", trace.name, *POLICY_WORDS)
    assert rows_of(capsys) == first and len(ran) == 12 - 5


def test_another_trace_of_the_same_name_is_run_anew(trace: Path) -> None:
    store = Lab(trace.parent / "run")
    first = PolicyJob(store.keep(held(trace)), "small", "lru", "prefix", 10, COST)
    store.run([first], 1)
    write(trace, [[1], [1]])
    assert len(store.missing([first, PolicyJob(store.keep(held(trace)), "small", "lru", "prefix", 10, COST)])) == 1


@pytest.mark.slow
def test_two_processes_give_what_one_gives(trace: Path) -> None:
    one = held(trace)
    alone, both = Lab(trace.parent / "alone"), Lab(trace.parent / "both")
    jobs = [[PolicyJob(place.keep(one), "small", name, "prefix", 30, COST) for name in ("lru", "wa", "sieve")] for place in (alone, both)]
    assert alone.run(jobs[0], 1) == both.run(jobs[1], 2)


def test_wins_leave_out_who_knows_the_future_and_name_ties() -> None:
    figures = {"lru": 0.2, "wa": 0.3, "arc": 0.3, "cached_attention": 0.8, "belady": 0.9}
    rows = [{"trace": "t", "policy": name, "form": "prefix", "capacity_blocks": 5, "hit_ratio_tokens": v} for name, v in figures.items()]
    (found,) = wins(rows)
    assert found["best"] == ["wa", "arc"]
    assert (found["over_lru"], found["over_next"]) == (pytest.approx(0.1), pytest.approx(0.1))


def test_the_table_is_stored_and_printed(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, store: Store
) -> None:
    from kvtide.lab_report import TABLES

    words = [word for word in POLICY_WORDS if word != "--json"]
    inserted: dict[str, Any] = {}
    monkeypatch.setattr("kvtide.commands.lab.store_rows", lambda url, what, rows: inserted.update({TABLES[what]: rows}) or "id")
    assert kvtide(monkeypatch, tmp_path, "policies", str(trace), *words, "--store", "chdb://x", "--plot", str(tmp_path / "p.html")) == 0
    out = capsys.readouterr().out
    assert (
        "best small prefix" in out
        and "belady (bound)" in out
        and "small: wa left the choice to LRU at 100 % of the requests (one category 100 %)" in out
    )
    assert len(inserted["lab_policy"]) == 12 and (tmp_path / "p.html").stat().st_size > 1000


def test_stored_rows_come_back(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvtide import lab_report

    rows = [
        {"trace": "t", "policy": "lru", "form": "prefix", "capacity_blocks": 5, "hit_ratio_blocks": 0.25,
         "hit_ratio_tokens": 0.2, "saved_prefill_s": 1.5}
    ]  # fmt: skip
    monkeypatch.setattr(Store, "open", classmethod(lambda cls, url, create: _Open(store)))
    id_ = lab_report.store_rows("chdb://x", "policies", rows)
    found = store.rows("SELECT * FROM lab_policy")
    assert [{name: row[name] for name in rows[0]} for row in found] == rows and found[0]["id"] == id_


class _Open:
    """A store that is open already, as `Store.open` gives it."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __enter__(self) -> Store:
        return self.store

    def __exit__(self, *exc: object) -> None:
        pass


def test_tiers_add_up_to_one_cache(trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tier_rows(held(trace), [10, 30], [0, 20], COST)
    by = {(row["hbm_blocks"], row["dram_blocks"]): row for row in rows}
    assert by[10, 20]["hit_ratio_tokens"] == pytest.approx(by[30, 0]["hit_ratio_tokens"])
    assert by[10, 20]["saved_prefill_s"] == pytest.approx(by[30, 0]["saved_prefill_s"])
    assert by[10, 20]["hbm_hit_ratio_tokens"] == pytest.approx(by[10, 0]["hit_ratio_tokens"])
    assert by[10, 0]["dram_hit_ratio_tokens"] == 0
    words = ("--format", "mooncake", "--capacities", "10,30", "--dram", "0,20", "--json")
    assert kvtide(monkeypatch, trace.parent, "tiers", trace.name, *words) == 0
    assert rows_of(capsys) == rows


def test_routers_rows(trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--format",
        "mooncake",
        "--routers",
        "random,least_load",
        "--instances",
        "2",
        "--loads",
        "0.8",
        "--seeds",
        "0,1",
        "--processes",
        "1",
    )
    assert kvtide(monkeypatch, trace.parent, "routers", trace.name, *words, "--json") == 0
    rows = rows_of(capsys)
    keys = {"workload", "router", "instances", "load", "seed", "ttft_p50_s", "ttft_p99_s", "ttft_mean_s", "hit_ratio_tokens"}
    assert len(rows) == 4 and all(keys <= set(row) for row in rows)


def test_list_names_every_policy_and_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvtide(monkeypatch, tmp_path, "--list") == 0
    out = capsys.readouterr().out
    assert all(f"\n{name} " in out for name in [*POLICIES, *ROUTERS])


# ---------------------------------------------------------------- odd input


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--policies", "lru,nonesuch"), "'nonesuch' unknown; choose of fifo, lru"),
        (("--capacities", "ten"), "'ten' is neither a number of blocks nor per cent"),
        (("--capacities", "-1"), "'-1' is neither"),
        (("--plot", "x.svg"), "must end in .png or .html"),
        (("--prefill-cost", "1"), "is not A,B"),
        (("--format", "mooncake", "--format", "weka"), "formats for 1 traces"),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: tuple[str, ...], says: str, trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kvtide(monkeypatch, trace.parent, "policies", trace.name, "--format", "mooncake", *words) == 2
    assert says in capsys.readouterr().err


def test_an_empty_or_missing_trace_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    for name in ("empty.jsonl", "absent.jsonl"):
        assert kvtide(monkeypatch, tmp_path, "policies", name, "--format", "mooncake") == 2
        assert name in capsys.readouterr().err


def test_a_cut_trace_gives_what_could_be_read_and_exit_code_2(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace.write_text(trace.read_text()[:-30])
    assert kvtide(monkeypatch, trace.parent, "policies", trace.name, *POLICY_WORDS) == 2
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["rows"]) == 12 and "small.jsonl:150" in captured.err
    assert kvtide(monkeypatch, trace.parent, "policies", trace.name, *POLICY_WORDS, "--skip-bad") == 0


def test_a_trace_without_blocks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n")
    assert kvtide(monkeypatch, tmp_path, "policies", "a.csv", "--format", "azure") == 2
    assert "no block hashes" in capsys.readouterr().err


def test_an_unsorted_trace_is_sorted_first(tmp_path: Path) -> None:
    chains = [[1, 2], [3], [1, 2, 4], [3, 5]]
    straight = held(write(tmp_path / "a.jsonl", chains))
    mixed = held(write(tmp_path / "b.jsonl", [chains[i] for i in (2, 0, 3, 1)], at_ms=[2000, 0, 3000, 1000]))
    assert np.array_equal(straight.trace.ids, mixed.trace.ids) and np.array_equal(straight.trace.ts_us, mixed.trace.ts_us)


def test_a_chain_that_loops_has_a_plain_form_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "loop.jsonl", [[1, 2], [1, 2, 1, 2]])
    words = ("loop.jsonl", "--format", "mooncake", "--policies", "lru", "--capacities", "2", "--processes", "1", "--json")
    assert kvtide(monkeypatch, tmp_path, "policies", *words) == 2
    assert "request 2 names a block behind another block" in capsys.readouterr().err
    assert kvtide(monkeypatch, tmp_path, "policies", *words, "--form", "plain") == 0
    assert rows_of(capsys)[0]["hit_ratio_blocks"] == pytest.approx(4 / 6)


def test_every_policy_on_a_loop_over_more_than_fits_and_on_chains_of_one_block(tmp_path: Path) -> None:
    """LRU and FIFO hit nothing of a loop one block longer than the cache; nobody hits more than Belady's (c - 1) / c in the long run."""
    one, store = held(write(tmp_path / "t.jsonl", [[i % 5] for i in range(200)])), Lab(tmp_path / "run")
    path = store.keep(one)
    figures = {
        row["policy"]: row["hit_ratio_blocks"] for row in store.run([PolicyJob(path, "t", name, "prefix", 4, COST) for name in POLICIES], 1)
    }
    assert figures["lru"] == figures["fifo"] == figures["vllm_lru"] == figures["wa"] == 0.0
    assert all(value <= figures["belady"] <= 0.8 for value in figures.values())


def test_capacities_are_blocks_or_shares() -> None:
    assert capacities_of("10%, 7,0,10%", 1000) == [0, 7, 100]
    with pytest.raises(UsageError, match="neither"):
        capacities_of("inf%", 10)
    assert chosen(None, {"a": 1, "b": 2}, "policy") == ["a", "b"] and chosen("b,b", {"a": 1, "b": 2}, "policy") == ["b"]


def test_a_run_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be made"):
        Lab(tmp_path / "file" / "run")


def test_results_of_other_code_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, store = held(write(tmp_path / "t.jsonl", [[1], [1]])), Lab(tmp_path / "run")
    job = PolicyJob(store.keep(one), "t", "lru", "prefix", 1, COST)
    store.run([job], 1)
    assert not store.missing([job])
    monkeypatch.setattr(lab, "sources_digest", lambda package: "other")
    assert store.missing([job]) == [job]


def test_policies_that_were_lru_say_why(tmp_path: Path) -> None:
    one = held(write(tmp_path / "t.jsonl", [[1, 2], [1, 2, 3]] * 100))
    assert fallbacks(one, ["lru", "kvflow"]) == [
        {"trace": "t", "policy": "kvflow", "absent": ["workflow"], "lru_ratio": None, "reasons": {}}
    ]
    (wa,) = fallbacks(one, ["wa"])
    assert (wa["absent"], wa["lru_ratio"], wa["reasons"]) == (["category", "turn"], 1.0, {"one_category": 1.0})


@pytest.mark.traces
@pytest.mark.slow
def test_sessions_are_sampled_and_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = TRACES / "weka-claude-code" / "traces_710.tar.zst"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    words = (
        str(path.resolve()),
        "--format",
        "weka",
        "--sessions",
        "2",
        "--policies",
        "lru",
        "--capacities",
        "10%",
        "--processes",
        "1",
        "--json",
    )
    assert kvtide(monkeypatch, tmp_path, "policies", *words) == 0
    assert rows_of(capsys)[0]["trace"] == "traces_710 (sampled: first 2 sessions)"


@pytest.mark.traces
@pytest.mark.parametrize("name", ["conversation_trace", "synthetic_trace"])
def test_the_document_holds_what_the_curve_says_of_lru(name: str) -> None:
    """The row of `lru` in docs/policies.md, to its last digit; and no policy there is above Belady's bound."""
    path = TRACES / "mooncake" / f"{name}.jsonl.zst"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    text = (Path(__file__).parents[1] / "docs" / "policies.md").read_text(encoding="utf-8")
    section = text.split(f"### {name}\n")[1].split("\n### ")[0]
    table = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    capacities = [int(cell.replace(",", "")) for cell in table[0][1:]]
    shown = {row[0].strip("`").split("`")[0]: [float(cell.split()[0]) for cell in row[1:]] for row in table[2:]}
    chains = held(path).chains
    histogram = DistanceHistogram(chains.block_size)
    histogram.add(RunStack().touch(chains.ts_us, chains.offsets, chains.hashes), chains)
    assert shown["lru"] == [round(100 * ratio, 2) for ratio in histogram.curve().hit_ratio(capacities, "tokens").tolist()]
    assert set(POLICIES) >= set(shown) and len(shown) >= 36
    assert all(value <= most for row in shown.values() for value, most in zip(row, shown["belady"], strict=True))
