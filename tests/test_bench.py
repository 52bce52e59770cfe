"""`kvtide bench`: every bench runs on a little input and says what it compared; figures themselves are never asserted."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from analytics.estimators import ESTIMATORS
from analytics.reuse.chains import ChainColumns, densify
from analytics.reuse.olken import olken_distances
from analytics.reuse.run_exact import RunStack
from bench import billion, curves, peers, scaling
from bench.shard import WEKA
from bench.timing import Took, best_of
from ingest.errors import UsageError
from kvtide.commands.bench import BENCHES, command

needs_peer = pytest.mark.skipif(find_spec("libcachesim") is None, reason="libcachesim is not installed (pip install 'kvtide[bench]')")
needs_weka = pytest.mark.skipif(not WEKA.exists(), reason="the WEKA archive is not beside the checkout")


def result(*arguments: str) -> dict[str, object]:
    run = CliRunner().invoke(command, [*arguments, "--json"], catch_exceptions=False)
    assert run.exit_code == 0
    return dict(json.loads(run.stdout))


@needs_weka
@pytest.mark.traces
def test_shard_bench_compares_the_same_blocks() -> None:
    got = result("shard", "--limit", "300")
    assert got["requests"] == 300 and got["blocks"] > 100_000
    for job, speed in (("accesses", "shard"), ("with_residency", "shard_with_residency")):
        ours = got[f"{speed}_blocks_per_second"]
        assert got[f"ratio_{job}"] == pytest.approx(ours / got["fenwick_blocks_per_second"])
        assert got[f"ratio_{job}_one_scope_dense"] == pytest.approx(ours / got["fenwick_one_scope_dense_blocks_per_second"])


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A Mooncake trace of 200 requests from 20 sessions that grow turn by turn."""
    rng, chains, rows, fresh = np.random.default_rng(1), [[session] for session in range(20)], [], 20
    for i in range(200):
        chain = chains[rng.integers(20)]
        grown = int(rng.integers(1, 6))
        chain.extend(range(fresh, fresh + grown))
        fresh += grown
        rows.append({"timestamp": 10 * i, "input_length": 512 * len(chain), "output_length": 1, "hash_ids": list(chain)})
    path = tmp_path / "tiny.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@needs_peer
def test_curves_bench_gives_every_key_and_equal_distances(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "CONVERSATION", tiny)
    got: dict[str, Any] = result("curves", "--trace", str(tiny))
    assert got["requests"] == 200 and got["same_distances"] is True and got["libcachesim"]["same_misses"] is True
    assert set(got["speeds"]) == {"run_exact", "run_exact_without_merging", "olken", "olken_with_hashing"}
    for timed in got["speeds"].values():
        assert timed["blocks_per_second"] == pytest.approx(got["blocks"] / timed["cpu_s"])
    ours = got["speeds"]["run_exact"]["cpu_s"]
    assert got["ratios"]["run_exact_over_olken"] == pytest.approx(got["speeds"]["olken"]["cpu_s"] / ours)
    assert got["ratios"]["merging_over_none"] == pytest.approx(got["speeds"]["run_exact_without_merging"]["cpu_s"] / ours)
    peer = got["libcachesim"]
    assert got["ratios"]["run_exact_over_libcachesim"] == pytest.approx(peer["run_exact_blocks_per_second"] / peer["blocks_per_second"])
    assert set(got["targets"]) <= set(got["ratios"])
    for limit in (got["limits"]["copy"], got["limits"]["compare"]):
        assert limit["blocks_per_second"] * limit["run_exact_share"] == pytest.approx(got["speeds"]["run_exact"]["blocks_per_second"])
    assert got["memory"]["hashes_bytes"] == 8 * got["blocks"]
    assert got["memory"]["run_exact_bytes"] > 0 and got["memory"]["peak_rss_bytes"] > 0
    assert set(ESTIMATORS) < set(got["estimators"])
    assert got["estimators"]["olken"]["mae"] == got["estimators"]["run_exact"]["mae"] == 0
    assert [(row["new_content"], row["max_depth_blocks"]) for row in got["scaling"]] == [
        (True, None), (True, scaling.DEPTH_BLOCKS), (False, None), (False, scaling.DEPTH_BLOCKS),
    ]  # fmt: skip


@needs_peer
def test_tables_show_every_section(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "CONVERSATION", tiny)
    run = CliRunner().invoke(command, ["curves", "--trace", str(tiny), "--limit", "50"], catch_exceptions=False)
    assert run.exit_code == 0
    sections = "speeds", "ratios", "limits", "memory", "libcachesim", "estimators", "scaling"
    assert all(f"curves: {section}" in run.stdout for section in sections)
    assert "olken_with_hashing" in run.stdout and "spread ratio" in run.stdout


@needs_peer
@needs_weka
@pytest.mark.traces
def test_peer_and_stack_miss_the_same_blocks_of_real_sessions() -> None:
    chains = curves.load(limit=300)
    got = peers.lru_passes(chains, curves.capacity_grid(densify(chains.hashes)[1], 5))
    assert got["same_misses"] is True and len(got["capacities"]) == 5


def test_stream_misses_are_those_of_an_lru_list(tiny: Path) -> None:
    chains = curves.load(tiny, "mooncake")
    stream, capacities = peers.leaf_first(chains).tolist(), np.array([1, 7, 40, 200, 10_000])
    for capacity, misses in zip(capacities.tolist(), peers.stream_misses(chains, capacities).tolist(), strict=True):
        held: dict[int, None] = {}
        missed = 0
        for block in stream:
            missed += block not in held
            held.pop(block, None)
            held[block] = None
            if len(held) > capacity:
                del held[next(iter(held))]
        assert misses == missed


def test_without_libcachesim_the_error_says_how_to_install_it(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libcachesim", None)
    with pytest.raises(UsageError, match=r"pip install 'kvtide\[bench\]'"):
        curves.run(str(tiny))


def test_disagreement_is_seen(tiny: Path) -> None:
    chains = curves.load(tiny, "mooncake")
    ids, distinct = densify(chains.hashes)
    runs = RunStack().touch(chains.ts_us, chains.offsets, chains.hashes)
    assert curves._all_agree([runs], chains, ids, distinct)
    runs.distance[np.flatnonzero(runs.distance >= 0)[-1]] += 1
    assert not curves._all_agree([runs], chains, ids, distinct)


def test_copies_grow_the_stack_only_where_their_content_is_new(tiny: Path) -> None:
    chains = curves.load(tiny, "mooncake")
    distinct = densify(chains.hashes)[1]
    for new_content, depth, grown in ((False, None, 1), (True, None, 5), (True, 100, 100 / distinct)):
        stack = RunStack(depth)
        assert len([seconds for seconds in scaling.touched(stack, chains, 5, new_content) if seconds.cpu_s > 0]) == 5
        assert stack.depth_blocks == round(grown * distinct)


def test_billion_bench_holds_to_its_depth() -> None:
    got = result("billion", "--limit", "3000")
    assert got["requests"] == 3000 and got["readings"][-1]["blocks"] == got["blocks"]
    small = billion.through_stack(60_000_000, depth=1 << 12)
    chunk = billion.CHUNK_BLOCKS / 60_000_000
    assert all(share <= reading["share"] < share + chunk for reading, share in zip(small["readings"], billion.REPORT_AT, strict=True))
    assert small["trimmed_blocks"] > 100_000 and all(reading["stack_blocks"] == 1 << 12 for reading in small["readings"])
    # What came cold and stands no longer was cut.
    assert small["readings"][-1]["cold_blocks"] == small["trimmed_blocks"] + (1 << 12)
    assert small["readings"][-1]["stack_bytes"] <= small["readings"][0]["stack_bytes"] < 2_000_000


def test_billion_stream_is_made_of_prefix_chains_the_same_for_a_seed_however_cut() -> None:
    whole = _columns(billion.Stream(3), 3000, 3000)
    assert np.array_equal(whole.hashes, _columns(billion.Stream(3), 3000, 7).hashes)
    assert not np.array_equal(whole.hashes, _columns(billion.Stream(4), 3000, 3000).hashes[: whole.blocks])
    before: dict[int, int] = {}
    for start, stop in zip(whole.offsets[:-1].tolist(), whole.offsets[1:].tolist(), strict=True):
        chain = [0, *whole.hashes[start:stop].tolist()]
        assert all(before.setdefault(block, parent) == parent for parent, block in zip(chain, chain[1:], strict=False))
    ids, distinct = densify(whole.hashes)
    stream = billion.Stream(3)
    _columns(stream, 3000, 3000)
    assert distinct == stream.distinct_blocks
    runs = RunStack().touch(whole.ts_us, whole.offsets, whole.hashes)
    assert np.array_equal(runs.per_block()[0], olken_distances(whole.ts_us, whole.offsets, ids, distinct)[0])


def _columns(stream: billion.Stream, requests: int, step: int) -> ChainColumns:
    """The stream's first requests, taken `step` at a time."""
    chains: list[Any] = []
    while len(chains) < requests:
        _, offsets, hashes = stream.chunk(min(step, requests - len(chains)))
        chains += [hashes[start:stop].copy() for start, stop in zip(offsets, offsets[1:], strict=False)]
    return ChainColumns.pack(range(requests), chains, [64 * chain.size for chain in chains], 64)


def test_best_of_takes_turns_and_keeps_the_least() -> None:
    order: list[str] = []
    best = best_of({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, {"a": 3, "b": 1})
    assert order == ["a", "b", "a", "a"] and best["a"].wall_s >= 0
    assert Took(1.0, 5.0, 2.0).least(Took(2.0, 1.0, 2.0)) == Took(1.0, 1.0, 2.0)
    assert Took(2.0, 1.0, 4.0).speed(10)["blocks_per_second"] == 5.0


@pytest.mark.kafka
@pytest.mark.slow
def test_pipeline_bench_reads_back_what_it_published(kafka: str) -> None:
    got = result("pipeline", "--limit", "2000")
    assert got["published"]["rows"] >= 4000
    assert 0 < got["whole_over_bare_ratio"] < 1


def test_a_missing_trace_is_named() -> None:
    run = CliRunner().invoke(command, ["shard", "--trace", "nowhere.tar.zst"])
    assert run.exit_code != 0 and "nowhere.tar.zst" in str(run.exception)


def test_every_bench_says_what_it_measures() -> None:
    text = CliRunner().invoke(command, ["--help"]).stdout
    assert all(name in text for name in BENCHES)
