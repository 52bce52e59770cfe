"""Curve algebra on closed forms, and working sets beside a count of sets."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analytics.curve import Curve, DistanceHistogram
from analytics.curve_algebra import GIB, Cliff, cliffs, decay, hull, knee, marginal_value_s_per_gib, merge, saved_s, working_sets
from analytics.policies import POLICIES
from analytics.reuse.chains import ChainColumns, densify
from analytics.reuse.run_exact import RunStack


def columns(chains: list[list[int]], block_size: int = 1, ts_us: list[int] | None = None) -> ChainColumns:
    times = list(range(len(chains))) if ts_us is None else ts_us
    prompts = [len(chain) * block_size for chain in chains]
    return ChainColumns.pack(times, [np.array(chain, np.uint64) for chain in chains], prompts, block_size)


def curve_of(*parts: ChainColumns) -> Curve:
    """One stack and one histogram over all parts."""
    stack, histogram = RunStack(), DistanceHistogram(parts[0].block_size)
    for part in parts:
        histogram.add(stack.touch(part.ts_us, part.offsets, part.hashes), part)
    return histogram.curve()


def curve_from(ratios: list[float]) -> Curve:
    """A curve of 1,000 one-token blocks whose hit ratio at capacity i + 1 is ratios[i]."""
    hits = 1000 * np.array(ratios)
    return Curve(np.arange(hits.size, dtype=np.float64), hits, hits, hits * 0, 1000.0, 1000.0, 0.0)


def loop(blocks: int, laps: int) -> ChainColumns:
    return columns([[1000 + block] for _ in range(laps) for block in range(blocks)])


# ---------------------------------------------------------------- merge and decay


def test_windows_of_one_stack_merge_into_the_curve_of_the_whole() -> None:
    rng = np.random.default_rng(1)
    data = columns([[int(key)] for key in rng.zipf(1.5, 900).clip(max=60)], block_size=4)
    stack, windows = RunStack(), []
    for start in range(0, 900, 300):
        part, histogram = data.slice(start, start + 300), DistanceHistogram(4)
        histogram.add(stack.touch(part.ts_us, part.offsets, part.hashes), part)
        windows.append(histogram.curve())
    merged, whole, capacities = merge(windows), curve_of(data), range(0, 70)
    for weight in ("blocks", "tokens", "cost"):
        assert np.allclose(merged.hit_ratio(capacities, weight, (1.0, 0.1)), whole.hit_ratio(capacities, weight, (1.0, 0.1)), atol=1e-12)
    assert (merged.total_blocks, merged.total_tokens, merged.total_token_context) == (900, 3600, whole.total_token_context)


def test_shards_and_partitions_stretch_the_axis() -> None:
    """Three loops of 10, 20 and 40 blocks, each on a third of the capacity: each becomes hits when its third holds it."""
    laps, blocks = 5, [10, 20, 40]
    merged = merge([curve_of(loop(b, laps)) for b in blocks], scales=[3.0] * 3)
    hits = [(laps - 1) * b for b in blocks]
    expected = [0, hits[0], hits[0] + hits[1], sum(hits)]
    assert (merged.hit_ratio([27, 30, 60, 120]) * laps * sum(blocks)).tolist() == pytest.approx(expected)
    uneven = merge([curve_of(loop(b, laps)) for b in blocks], scales=[7.0, 3.5, 1.75])
    assert (uneven.hit_ratio([63, 70]) * laps * sum(blocks)).tolist() == pytest.approx([0, sum(hits)])


def test_hash_shards_of_a_stream_give_its_curve_back() -> None:
    """Four shards by hash of 4,000 keys: within 0.02 of the whole (sampling error of a quarter of the keys) at 20 capacities."""
    rng = np.random.default_rng(3)
    keys = rng.permutation(4000)[rng.zipf(1.2, 40_000) % 4000].astype(np.uint64)
    shard = np.random.default_rng(4).integers(0, 4, 4000)[keys]
    merged = merge([curve_of(columns([[int(k)] for k in keys[shard == i]])) for i in range(4)], scales=[4.0] * 4)
    ids, distinct = densify(keys)
    for capacity in np.geomspace(40, 4000, 20).round().astype(int):
        assert merged.hit_ratio([capacity])[0] == pytest.approx(POLICIES["lru"](ids, distinct, int(capacity)).mean(), abs=0.02)


def test_decay_weighs_the_newest_most() -> None:
    old, new = curve_from([0.5, 0.5]), curve_from([0.0, 0.2])
    decayed = decay([old, old, new], 0.5)
    assert decayed.total_blocks == 1750
    assert decayed.hit_ratio([1, 2]).tolist() == pytest.approx([0.75 * 0.5 / 1.75, (0.75 * 0.5 + 0.2) / 1.75])
    assert np.allclose(decay([old, new], 1.0).hit_ratio([1, 2]), merge([old, new]).hit_ratio([1, 2]))
    for bad in (0.0, 1.5):
        with pytest.raises(ValueError, match="keep_ratio"):
            decay([old], bad)


def test_merge_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="curve"):
        merge([])
    with pytest.raises(ValueError, match="scale"):
        merge([curve_from([0.1])], scales=[0.0])
    with pytest.raises(ValueError, match="weight"):
        merge([curve_from([0.1])], weights=[1.0, 1.0])


# ---------------------------------------------------------------- hull, knee, cliffs


def test_hull_of_a_loop_is_the_chord_to_its_length() -> None:
    curve = curve_of(loop(100, 10))
    around = hull(curve)
    assert around.capacities.tolist() == [0, 100] and around.ratios.tolist() == [0, 0.9]
    assert around.hit_ratio([50, 100, 500]).tolist() == pytest.approx([0.45, 0.9, 0.9])
    assert around.slope([0, 99, 100]).tolist() == pytest.approx([0.009, 0.009, 0])
    assert cliffs(curve) == [Cliff(0.0, 100.0, pytest.approx(0.9 * 99 / 100))]


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=60))
def test_hull_is_concave_never_below_the_curve_and_touches_it_at_its_vertices(steps: list[int]) -> None:
    ratios = np.cumsum(steps) / max(sum(steps), 1) * 0.8
    curve = curve_from(ratios.tolist())
    around, capacities = hull(curve), np.arange(0, 70)
    assert (around.hit_ratio(capacities) >= curve.hit_ratio(capacities) - 1e-12).all()
    assert np.allclose(around.ratios, curve.hit_ratio(around.capacities.astype(int)))
    slopes = np.diff(around.ratios) / np.diff(around.capacities)
    assert (np.diff(slopes) < 1e-12).all()


def test_a_concave_curve_is_its_own_hull_and_has_no_cliff() -> None:
    curve = curve_from([math.sqrt((i + 1) / 400) for i in range(400)])
    assert np.allclose(hull(curve).hit_ratio(range(401)), curve.hit_ratio(range(401)))
    assert cliffs(curve, 0.001) == []


def test_two_cliffs_are_told_apart() -> None:
    curve = curve_from([0.3] * 1 + [0.3] * 98 + [0.6] + [0.6] * 299 + [0.9])
    assert cliffs(curve) == [Cliff(1.0, 100.0, pytest.approx(0.3 * 98 / 99)), Cliff(100.0, 400.0, pytest.approx(0.3 * 299 / 300))]
    assert cliffs(curve, 0.298) == cliffs(curve)[1:]


def test_knee_of_known_shapes() -> None:
    assert knee(curve_from([math.sqrt((i + 1) / 400) for i in range(400)])) == 100  # sqrt(x) - x is greatest at 1/4
    rate = 5.0  # (1 - exp(-rx)) / (1 - exp(-r)) - x is greatest where exp(-rx) = (1 - exp(-r)) / r
    found = knee(curve_from([(1 - math.exp(-rate * (i + 1) / 1000)) for i in range(1000)]))
    assert found == pytest.approx(1000 / rate * math.log(rate / (1 - math.exp(-rate))), abs=1)
    empty = Curve(*(np.empty(0) for _ in range(4)), 5.0, 5.0, 0.0)
    assert knee(empty) == 0 and cliffs(empty) == [] and hull(empty).hit_ratio([9]).tolist() == [0]


# ---------------------------------------------------------------- value


def test_saved_seconds_and_value_of_a_gib() -> None:
    """Uniform stack distances: every block of capacity brings 1/1000 of 1,000 tokens' hits at 2 ms a token."""
    curve, cost = curve_from([(i + 1) / 1000 for i in range(1000)]), (0.002, 0.0)
    assert saved_s(curve, [0, 250, 1000, 5000], cost).tolist() == pytest.approx([0, 0.5, 2.0, 2.0])
    bytes_per_block = GIB / 100  # 100 blocks a GiB
    for on_hull in (False, True):
        value = marginal_value_s_per_gib(curve, [0, 500, 950, 1000], cost, bytes_per_block, on_hull=on_hull)
        assert value.tolist() == pytest.approx([0.2, 0.2, 0.1, 0.0])
        halves = marginal_value_s_per_gib(curve, [950], cost, bytes_per_block, step_gib=0.5, on_hull=on_hull)
        assert halves.tolist() == pytest.approx([0.2])
    with pytest.raises(ValueError, match="positive"):
        marginal_value_s_per_gib(curve, [0], cost, 0.0)


def test_before_a_cliff_the_next_gib_is_worth_nothing_unless_the_stream_is_split() -> None:
    curve, cost = curve_of(loop(100, 10)), (0.01, 0.0)
    args = (curve, [0, 50, 90], cost, GIB / 10)
    assert marginal_value_s_per_gib(*args).tolist() == pytest.approx([0, 0, 9.0])
    assert marginal_value_s_per_gib(*args, on_hull=True).tolist() == pytest.approx([0.9, 0.9, 0.9])


# ---------------------------------------------------------------- working sets


def test_working_set_of_a_loop() -> None:
    """20 blocks, one a second: a window of 60 s holds all 20, repeats two thirds of its references, each 20 s old."""
    chains = [[block] for _ in range(12) for block in range(20)]
    data = columns(chains, ts_us=[i * 1_000_000 for i in range(240)])
    runs = RunStack().touch(data.ts_us, data.offsets, data.hashes)
    found = working_sets(runs, data.ts_us, 60_000_000)
    assert found.end_us.tolist() == [60_000_000, 120_000_000, 180_000_000, 240_000_000]
    assert found.distinct_blocks.tolist() == [20] * 4 and found.accessed_blocks.tolist() == [60] * 4
    assert found.repeat_ratio.tolist() == pytest.approx([2 / 3] * 4)
    assert found.mean_reuse_us.tolist() == pytest.approx([20e6] * 4)
    short = working_sets(runs, data.ts_us, 10_000_000)
    assert set(short.distinct_blocks) == {10} and not short.repeat_ratio.any() and np.isnan(short.mean_reuse_us).all()


Trace = list[tuple[int, int]]


@settings(deadline=None, max_examples=150)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 8), st.integers(1, 4)), min_size=1, max_size=40),
    st.integers(1, 30),
    st.integers(1, 12),
)
def test_working_sets_equal_a_count_of_sets(rows: list[tuple[int, int, int]], window_us: int, step_us: int) -> None:
    chains, times, now = [], [], 5
    for gap, branch, depth in rows:
        now += gap
        times.append(now)
        chains.append([branch // 3 * 100 + level if level < 2 else branch * 100 + 50 + level for level in range(depth)])
    data = columns(chains, ts_us=times)
    found = working_sets(RunStack().touch(data.ts_us, data.offsets, data.hashes), data.ts_us, window_us, step_us)
    assert found.end_us.tolist() == list(range((times[0] // step_us + 1) * step_us, (times[-1] // step_us + 1) * step_us + 1, step_us))
    for i, end in enumerate(found.end_us.tolist()):
        last: dict[int, int] = {}
        ages, accessed = [], 0
        for ts, chain in zip(times, chains, strict=True):
            if end - window_us <= ts < end:
                accessed += len(chain)
                ages += [ts - last[block] for block in chain if block in last]
                last.update(dict.fromkeys(chain, ts))
        assert (found.distinct_blocks[i], found.accessed_blocks[i]) == (len(last), accessed)
        assert found.repeat_ratio[i] == pytest.approx(len(ages) / accessed if accessed else 0)
        assert found.mean_reuse_us[i] == pytest.approx(sum(ages) / len(ages) if ages else math.nan, nan_ok=True)


def test_working_sets_of_nothing_and_of_no_length() -> None:
    data = columns([])
    runs = RunStack().touch(data.ts_us, data.offsets, data.hashes)
    assert working_sets(runs, data.ts_us, 60).end_us.size == 0
    with pytest.raises(ValueError, match="window_us"):
        working_sets(runs, data.ts_us, 0)
