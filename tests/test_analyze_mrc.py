"""Curves, the registry of estimators, and the commands analyze and mrc, on closed forms, on a plain LRU and on the public traces."""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analytics.curve import Curve, DistanceHistogram
from analytics.estimators import EXACT as ESTIMATORS
from analytics.reuse.chains import ChainBuilder, ChainColumns
from analytics.reuse.run_exact import RunStack
from kvtide.cli import main

TRACES = Path(__file__).parents[1] / ".." / "shared" / "traces"
# Leaf-first LRU, 512-token blocks (Mooncake FAST'25 traces): share of blocks served at each capacity.
CAPACITIES = [100, 1000, 3000, 5859, 10000, 20000, 30000, 50000, 97656]
LEAF_FIRST = {
    "conversation": [0.0418, 0.0445, 0.0653, 0.1361, 0.2116, 0.2878, 0.3257, 0.3546, 0.3635],
    "synthetic": [0.0071, 0.0841, 0.1906, 0.3094, 0.4239, 0.5718, 0.6242, 0.6396, 0.6396],
}
HOLDS = {
    "conversation": {"requests": 12031, "blocks": 288500, "distinct_blocks": 182790, "ideal": (0.3664, 0.3736)},
    "synthetic": {"requests": 3993, "blocks": 121877, "distinct_blocks": 43924, "ideal": (0.6396, 0.6512)},
}


def kvtide(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Run the command line in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["kvtide", *words])
    with pytest.raises(SystemExit) as end:
        main()
    code = end.value.code
    return code if isinstance(code, int) else 0


def answer(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The one JSON document on stdout."""
    out = capsys.readouterr().out
    document: dict[str, Any] = json.loads(out)
    assert out.count("\n") == 1
    return document


def trace(name: str) -> str:
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"{path} is absent")
    return str(path)


def columns(chains: list[list[int]], block_size: int = 1, tokens: list[list[int]] | None = None) -> ChainColumns:
    builder = ChainBuilder(block_size)
    for i, chain in enumerate(chains):
        given_tokens = None if tokens is None else np.array(tokens[i], np.int32)
        total = len(chain) * block_size if tokens is None else sum(tokens[i])
        builder.append(i, np.array(chain, np.uint64), total, given_tokens)
    return builder.build()


# ---------------------------------------------------------------- every estimator


@pytest.fixture(params=sorted(ESTIMATORS))
def estimate(request: pytest.FixtureRequest) -> Any:
    return ESTIMATORS[request.param]


def test_estimator_cyclic_scan(estimate: Any) -> None:
    blocks, laps = 50, 20
    curve = estimate(columns([[1000 + block] for _ in range(laps) for block in range(blocks)]))
    assert curve.hit_ratio([1, blocks - 1, blocks, 10 * blocks]).tolist() == [0, 0, 1 - 1 / laps, 1 - 1 / laps]
    assert curve.ideal_ratio() == 1 - 1 / laps


def test_estimator_uniform_references(estimate: Any) -> None:
    blocks, count = 100, 60_000
    keys = np.random.default_rng(11).integers(0, blocks, count)
    curve = estimate(ChainColumns.pack(range(count), np.split(keys.astype(np.uint64), count), [1] * count, 1))
    sizes = np.arange(5, blocks, 5)
    assert np.abs(curve.hit_ratio(sizes) - sizes / blocks).max() < 0.01


def test_estimator_never_falls_and_ends_at_its_ideal(estimate: Any) -> None:
    rng = np.random.default_rng(4)
    chains = [[*range(int(head) * 100, int(head) * 100 + int(length))] for head, length in zip(*rng.integers(1, 30, (2, 500)), strict=True)]
    curve = estimate(columns(chains, 16))
    for weight in ("blocks", "tokens", "cost"):
        ratios = curve.hit_ratio(np.arange(1, 2000), weight, (1e-5, 1e-9))
        assert np.all(np.diff(ratios) >= 0) and ratios[-1] == curve.ideal_ratio(weight, (1e-5, 1e-9)) <= 1
    distinct = len({block for chain in chains for block in chain})
    assert curve.ideal_ratio() == pytest.approx(1 - distinct / curve.total_blocks)


def test_estimator_of_two_traces_with_disjoint_keys(estimate: Any) -> None:
    chains = [[*range(10 + i % 7)] for i in range(100)]
    apart = [[block + 1000 for block in chain] for chain in chains]
    both, one = estimate(columns(chains + apart)), estimate(columns(chains))
    assert both.hit_ratio([5, 12, 100]).tolist() == one.hit_ratio([5, 12, 100]).tolist()


def test_estimator_of_nothing(estimate: Any) -> None:
    curve = estimate(columns([[], []]))
    assert curve.hit_ratio([1, 10]).tolist() == [0, 0] and curve.ideal_ratio() == 0


# ---------------------------------------------------------------- curve beside a plain LRU, in every weight


def replay(chains: list[list[int]], tokens: list[list[int]], capacity: int) -> tuple[int, int, float]:
    """Blocks, tokens and token_context that an LRU of `capacity` blocks serves as leading runs; tail first on its way in."""
    cache: OrderedDict[int, None] = OrderedDict()
    blocks = served_tokens = 0
    context = 0.0
    for chain, sizes in zip(chains, tokens, strict=True):
        start = 0
        for block, size in zip(chain, sizes, strict=True):
            if block not in cache:
                break
            blocks, served_tokens, context = blocks + 1, served_tokens + size, context + size * (start + size / 2)
            start += size
        for block in reversed(chain):
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return blocks, served_tokens, context


@st.composite
def sized_traces(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], int, bool]:
    """Chains of a small tree, tokens of each block: equal but for tails, or a property of the block."""
    block_size, equal = draw(st.integers(2, 9)), draw(st.booleans())
    chains: list[list[int]] = [[]]
    fresh = 1
    for back, keep, new in draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12), st.integers(0, 6)), max_size=25)):
        chains.append(chains[-1 - back % len(chains)][:keep] + list(range(fresh, fresh + new)))
        fresh += new
    if not equal:
        return chains, [[1 + 7 * block % 20 for block in chain] for chain in chains], block_size, equal
    tokens = [[block_size] * len(chain) for chain in chains]
    for sizes in tokens:
        if sizes:
            sizes[-1] = draw(st.integers(1, block_size))
    return chains, tokens, block_size, equal


@settings(max_examples=80, deadline=None)
@given(sized_traces(), st.integers(1, 40), st.sampled_from(sorted(ESTIMATORS)))
def test_curve_is_what_a_plain_lru_serves(case: tuple[list[list[int]], list[list[int]], int, bool], capacity: int, name: str) -> None:
    chains, tokens, block_size, equal = case
    builder = ChainBuilder(block_size)
    for i, (chain, sizes) in enumerate(zip(chains, tokens, strict=True)):
        builder.append(i, np.array(chain, np.uint64), sum(sizes), None if equal else np.array(sizes, np.int32))
    curve = ESTIMATORS[name](builder.build())
    blocks, served, context = replay(chains, tokens, capacity)
    prompts = [sum(sizes) for sizes in tokens]
    assert (curve.total_blocks, curve.total_tokens) == (sum(map(len, chains)), sum(prompts))
    if sum(prompts):
        assert curve.hit_ratio([capacity])[0] == blocks / curve.total_blocks
        assert curve.hit_ratio([capacity], "tokens")[0] == served / sum(prompts)
        whole = 3.0 * sum(prompts) + 0.5 * sum(prompt**2 / 2 for prompt in prompts)
        assert curve.hit_ratio([capacity], "cost", (3.0, 0.5))[0] == pytest.approx((3.0 * served + 0.5 * context) / whole, rel=1e-12)


def test_curve_refuses_what_it_cannot_weigh() -> None:
    empty = np.empty(0)
    curve = Curve(empty, empty, empty, empty, 0, 0, 0)
    with pytest.raises(ValueError, match="needs the cost model"):
        curve.hit_ratio([1], "cost")
    with pytest.raises(ValueError, match="unknown"):
        curve.hit_ratio([1], "bytes")  # type: ignore[arg-type]


def test_histogram_refuses_a_second_block_size() -> None:
    chains = columns([[1, 2]], 16)
    with pytest.raises(ValueError, match="block_size"):
        DistanceHistogram(32).add(RunStack().touch(chains.ts_us, chains.offsets, chains.hashes), chains)


def test_unequal_and_equal_blocks_stand_together_in_one_builder() -> None:
    builder = ChainBuilder(10)
    builder.append(0, np.array([1, 2], np.uint64), 15)
    builder.append(1, np.array([3], np.uint64), 4, np.array([4], np.int32))
    builder.append(2, np.empty(0, np.uint64), 0)
    tokens = builder.build().block_tokens
    assert tokens is not None and tokens.tolist() == [10, 5, 4]


# ---------------------------------------------------------------- commands on small files


def mooncake(path: Path, rows: list[dict[str, Any]] | list[str]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def row(timestamp: int, input_length: int, hash_ids: list[int], output_length: int = 5) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": input_length, "output_length": output_length, "hash_ids": hash_ids}


GOOD = [row(0, 1024, [1, 2]), row(1000, 1100, [1, 2, 3]), row(3000, 600, [1, 9])]


def test_analyze_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvtide(monkeypatch, "analyze", mooncake(tmp_path / "t.jsonl", GOOD), "--format", "mooncake", "--json") == 0
    result = answer(capsys)
    assert (result["requests"], result["blocks"], result["distinct_blocks"], result["block_size"]) == (3, 7, 4, 512)
    assert result["ideal_hit_ratio"] == {"blocks": 3 / 7, "tokens": (1024 + 512) / 2724}
    assert (result["prompt_tokens"], result["output_tokens"], result["span_s"], result["bad_records"]) == (2724, 15, 3.0, 0)
    assert result["mean_prompt_tokens"] == 908 and result["reported_hit_ratio"] is None
    assert [tenant["assigned"] for tenant in result["tenants"]] == [False]


def test_tenants_share_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(i, 1024, [1, 100 + i % 40]) for i in range(400)]
    path = mooncake(tmp_path / "t.jsonl", rows)
    assert kvtide(monkeypatch, "analyze", path, "-f", "mooncake", "--assign-tenants", "zipf:3", "--json") == 0
    result = answer(capsys)
    tenants = result["tenants"]
    assert [tenant["tenant"] for tenant in tenants] == ["tenant-01", "tenant-02", "tenant-03"]
    assert all(tenant["assigned"] for tenant in tenants)
    assert result["distinct_blocks"] == 43 == sum(tenant["distinct_blocks"] for tenant in tenants)
    assert result["requests"] == sum(tenant["requests"] for tenant in tenants)
    kvtide(monkeypatch, "mrc", path, "-f", "mooncake", "--assign-tenants", "zipf:3", "--json", "--capacities", "5,43")
    curve = answer(capsys)
    assert curve["ideal"]["blocks"] == result["ideal_hit_ratio"]["blocks"] == curve["hit_ratio_blocks"][1]
    for own, held in zip(curve["tenants"], tenants, strict=True):
        assert {weight: own["ideal"][weight] for weight in ("blocks", "tokens")} == held["ideal_hit_ratio"]


def test_bad_lines_are_named_and_the_rest_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = ['{"timestamp": 1, "input_le', json.dumps(row(1, -4, [1]))]
    path = mooncake(tmp_path / "t.jsonl", [json.dumps(good) for good in GOOD[:2]] + broken + [json.dumps(GOOD[2])])
    assert kvtide(monkeypatch, "analyze", path, "--format", "mooncake", "--json") == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["requests"] == 3 and json.loads(out)["bad_records"] == 2
    assert len(err.splitlines()) == 2 and f"{path}:3:" in err and f"{path}:4:" in err
    assert kvtide(monkeypatch, "analyze", path, "--format", "mooncake", "--skip-bad") == 0
    assert "0.4286" in capsys.readouterr().out
    assert kvtide(monkeypatch, "mrc", path, "--format", "mooncake", "--json", "--capacities", "4") == 2
    assert json.loads(capsys.readouterr().out)["hit_ratio_blocks"] == [3 / 7]


def test_only_the_first_bad_lines_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = mooncake(tmp_path / "t.jsonl", [json.dumps(GOOD[0]), *["{"] * 33])
    assert kvtide(monkeypatch, "analyze", path, "--format", "mooncake", "--json") == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["bad_records"] == 33
    assert len(err.splitlines()) == 21 and "13 more records" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("mrc", "--capacities", "5,3"), "rising positive"),
        (("mrc", "--capacities", "0,3"), "rising positive"),
        (("mrc", "--capacities", "3,3"), "rising positive"),
        (("mrc", "--capacities", "many"), "rising positive"),
        (("mrc", "--capacities", "5", "--points", "4"), "not both"),
        (("mrc", "--points", "1"), "points"),
        (("mrc", "--estimator", "guess"), "run_exact"),
        (("mrc", "--weight", "bytes"), "tokens"),
        (("mrc", "--param", "rate=0.5"), "no parameters"),
        (("mrc", "--estimator", "shards", "--param", "size=3"), "rate, adj, seed"),
        (("mrc", "--estimator", "shards", "--param", "rate=half"), "a number"),
        (("mrc", "--estimator", "shards", "--param", "rate=2"), "at most 1"),
        (("mrc", "--estimator", "shards", "--param", "adj=1"), "true or false"),
        (("analyze", "--tenant", "a", "--assign-tenants", "zipf:2"), "not both"),
        (("analyze", "--assign-tenants", "zipf"), "zipf:N"),
        (("analyze", "--limit", "0"), "limit"),
    ],
)
def test_bad_usage_ends_with_2(
    words: tuple[str, ...], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = mooncake(tmp_path / "t.jsonl", GOOD)
    assert kvtide(monkeypatch, words[0], path, "--format", "mooncake", *words[1:]) == 2
    out, err = capsys.readouterr()
    assert reason in err and out == ""


@pytest.mark.parametrize("name", ["empty.jsonl", "absent.jsonl"])
def test_files_without_requests_end_with_2(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mooncake(tmp_path / "empty.jsonl", [])
    for command in ("analyze", "mrc"):
        assert kvtide(monkeypatch, command, str(tmp_path / name), "--format", "mooncake", "--json") == 2
        out, err = capsys.readouterr()
        assert out == "" and name in err and "Traceback" not in err


def test_a_trace_of_load_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "azure.csv"
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n")
    assert kvtide(monkeypatch, "analyze", str(path), "--format", "azure", "--json") == 0
    result = answer(capsys)
    assert result["ideal_hit_ratio"] is None and result["block_size"] is None
    assert (result["requests"], result["prompt_tokens"], result["output_tokens"]) == (2, 770, 153)
    assert result["span_s"] == pytest.approx(4.314579)
    assert kvtide(monkeypatch, "mrc", str(path), "--format", "azure") == 2
    assert "no block hashes" in capsys.readouterr().err


def test_mrc_spaces_capacities_up_to_all_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = mooncake(tmp_path / "t.jsonl", [row(i, 512 * 5, list(range(9 * (i % 50), 9 * (i % 50) + 5))) for i in range(200)])
    assert kvtide(monkeypatch, "mrc", path, "--format", "mooncake", "--json", "--points", "6") == 0
    result = answer(capsys)
    assert result["capacities"][-1] == 250 and len(result["capacities"]) <= 6
    assert result["hit_ratio_blocks"][-1] == result["ideal"]["blocks"] == 0.75
    assert kvtide(monkeypatch, "mrc", path, "--format", "mooncake", "--weight", "tokens", "--capacities", "249,250") == 0
    text = capsys.readouterr().out
    assert "hit ratio in tokens" in text and "0.7500" in text and "M blocks/s" in text


def test_mrc_hands_parameters_to_the_estimator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = mooncake(tmp_path / "t.jsonl", [row(i, 512 * 5, list(range(9 * (i % 50), 9 * (i % 50) + 5))) for i in range(200)])
    words = ("mrc", path, "-f", "mooncake", "--estimator", "shards", "-p", "rate=1", "-p", "adj=false", "--json", "--capacities", "249,250")
    assert kvtide(monkeypatch, *words) == 0
    result = answer(capsys)
    assert result["parameters"] == {"rate": 1.0, "adj": False} and result["hit_ratio_blocks"][1] == 0.75


# ---------------------------------------------------------------- commands on the public traces


@pytest.mark.traces
@pytest.mark.parametrize("name", sorted(HOLDS))
def test_analyze_of_mooncake(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = trace(f"mooncake/{name}_trace.jsonl.zst")
    assert kvtide(monkeypatch, "analyze", path, "--format", "mooncake", "--json") == 0
    result = answer(capsys)
    expected = HOLDS[name]
    assert {key: result[key] for key in ("requests", "blocks", "distinct_blocks")} == {k: v for k, v in expected.items() if k != "ideal"}
    ideal = result["ideal_hit_ratio"]
    assert (round(ideal["blocks"], 4), round(ideal["tokens"], 4)) == expected["ideal"]


@pytest.mark.traces
@pytest.mark.parametrize("name", sorted(LEAF_FIRST))
@pytest.mark.parametrize("estimator", sorted(ESTIMATORS))
def test_mrc_of_mooncake(name: str, estimator: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = trace(f"mooncake/{name}_trace.jsonl.zst")
    sizes = ",".join(map(str, CAPACITIES))
    assert kvtide(monkeypatch, "mrc", path, "--format", "mooncake", "--estimator", estimator, "--capacities", sizes, "--json") == 0
    result = answer(capsys)
    assert [round(ratio, 4) for ratio in result["hit_ratio_blocks"]] == LEAF_FIRST[name]
    assert (round(result["ideal"]["blocks"], 4), round(result["ideal"]["tokens"], 4)) == HOLDS[name]["ideal"]
    assert result["capacities"] == CAPACITIES and result["estimator"] == estimator and result["blocks_per_second"] > 0


@pytest.mark.traces
def test_analyze_of_ragpulse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvtide(monkeypatch, "analyze", trace("ragpulse/0_trace.jsonl"), "--format", "ragpulse", "--json") == 0
    result = answer(capsys)
    assert (result["requests"], result["blocks"], result["distinct_blocks"]) == (7106, 71583, 58727)
    assert round(result["ideal_hit_ratio"]["tokens"], 4) == 0.3153 and round(result["ideal_hit_ratio"]["blocks"], 4) == 0.1796
    assert result["block_size"] is None


@pytest.mark.traces
def test_analyze_of_dynamo_shows_what_the_engine_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert kvtide(monkeypatch, "analyze", trace("dynamo/pi_request_trace.jsonl.gz"), "--format", "dynamo", "--json") == 0
    result = answer(capsys)
    assert (result["requests"], result["blocks"], result["distinct_blocks"]) == (17, 4163, 1183)
    assert round(result["ideal_hit_ratio"]["blocks"], 4) == 0.7158 and round(result["reported_hit_ratio"], 4) == 0.7555


@pytest.mark.traces
@pytest.mark.slow
def test_analyze_of_weka(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    path = trace("weka-claude-code/traces_710.tar.zst")
    assert kvtide(monkeypatch, "analyze", path, "--format", "weka", "--json") == 0
    result = answer(capsys)
    assert (result["requests"], result["blocks"], result["distinct_blocks"]) == (49334, 94310647, 3450959)
    assert round(result["ideal_hit_ratio"]["blocks"], 4) == 0.9634


@pytest.mark.traces
@pytest.mark.slow
def test_run_level_distances_equal_olken_on_real_sessions() -> None:
    from bench.curves import run_exact_beside_olken

    measured = run_exact_beside_olken(Path(trace("weka-claude-code/traces_710.tar.zst")), limit=4000)
    assert measured["same_distances"] and measured["blocks"] > 1_000_000, measured
