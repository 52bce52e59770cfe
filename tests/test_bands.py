"""Confidence bands: how often they hold the truth, over draws of the sample (jackknife) and over stretches of one load (bootstrap)."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from analytics.bands import jackknife_band, window_band
from analytics.estimators import ESTIMATORS
from analytics.reuse.chains import ChainColumns, densify
from analytics.reuse.olken import olken_distances


def references(keys: np.ndarray) -> ChainColumns:
    n = keys.size
    return ChainColumns(np.arange(n), np.arange(n + 1), keys.astype(np.uint64), np.ones(n, np.int64), 1)


def zipf(distinct: int, count: int, seed: int, exponent: float = 0.8) -> ChainColumns:
    popularity = 1.0 / np.arange(1, distinct + 1) ** exponent
    return references(np.searchsorted(np.cumsum(popularity / popularity.sum()), np.random.default_rng(seed).random(count)))


def coverage(name: str, seeds: range, chains: ChainColumns, sampled: float, **given: float) -> float:
    """Share of (draw, capacity) whose band holds the exact curve; 40 log-spaced capacities up to 90 % of the distinct blocks."""
    exact, distinct = ESTIMATORS["olken"](chains), np.unique(chains.hashes).size
    sizes = np.unique(np.geomspace(50 / sampled, 0.9 * distinct, 40).round().astype(np.int64))
    held = []
    for seed in seeds:
        estimate = partial(ESTIMATORS[name], chains, seed=seed, **given)
        band = jackknife_band(lambda fold, estimate=estimate: estimate(fold=fold), sizes, rate=sampled, shards=24)  # type: ignore[misc]
        held.append(band.covers(exact.hit_ratio(sizes)))
    return float(np.mean(held))


def stretches(count: int, windows: int, per_window: int, memory: float) -> tuple[np.ndarray, np.ndarray]:
    """Hits float64[count, windows, capacities] and the long-run ratio of a load whose share of narrow reuse wanders."""
    rng, level, keys, blocks = np.random.default_rng(1), 0.0, [], 1000
    for _ in range(count * windows + windows):
        level = memory * level + np.sqrt(1 - memory**2) * rng.normal()
        narrow = rng.binomial(per_window, 1 / (1 + np.exp(-level)))
        both = np.concatenate([rng.integers(0, 50, narrow), rng.integers(50, blocks, per_window - narrow)])
        keys.append(rng.permutation(both))
    ids, distinct = densify(np.concatenate(keys).astype(np.uint64))
    distances, _ = olken_distances(np.arange(ids.size), np.arange(ids.size + 1), ids, distinct)
    warm = distances[windows * per_window :].reshape(count, windows, per_window)
    sizes = np.unique(np.geomspace(10, 0.8 * blocks, 40).round().astype(np.int64))
    hits = np.stack([((warm >= 0) & (warm < size)).sum(axis=2) for size in sizes], axis=2).astype(np.float64)
    return hits, hits.mean(axis=(0, 1)) / per_window


def test_jackknife_bands_hold_the_exact_curve() -> None:
    """100 draws of a small trace here, so sure to 0.04; the slow test below draws 200 of a larger one."""
    assert 0.91 < coverage("shards_hot", range(100), zipf(3000, 12_000, 5), 0.2, rate=0.2, hot=150) < 0.99


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "given"), [("shards_hot", {"rate": 0.08, "hot": 600}), ("shards_fixed", {"s_max": 960})], ids=["shards_hot", "shards_fixed"]
)
def test_jackknife_bands_hold_the_exact_curve_in_95_of_100(name: str, given: dict[str, float]) -> None:
    assert 0.93 <= coverage(name, range(200), zipf(12_000, 50_000, 5), 0.08, **given) <= 0.97


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "given"), [("shards_hot", {"rate": 0.08, "hot": 600}), ("shards_fixed", {"s_max": 960})], ids=["shards_hot", "shards_fixed"]
)
def test_jackknife_bands_hold_a_stream_that_nothing_was_chosen_by(name: str, given: dict[str, float]) -> None:
    chains = zipf(12_000, 50_000, 77, 0.9)
    sampled = 0.08 if name == "shards_hot" else 960 / np.unique(chains.hashes).size
    assert 0.93 <= coverage(name, range(5000, 5200), chains, sampled, **given) <= 0.97


@pytest.mark.parametrize(("memory", "run_windows"), [(0.0, 3), (0.5, 8)])
def test_window_bands_hold_the_load_behind_them(memory: float, run_windows: int) -> None:
    hits, truth = stretches(400, 60, 250, memory)
    totals = np.full(60, 250.0)
    held = [window_band(one, totals, run_windows=run_windows, draws=400, seed=i).covers(truth) for i, one in enumerate(hits)]
    assert 0.93 <= np.mean(held) <= 0.97


def test_windows_that_remember_need_longer_runs() -> None:
    hits, _ = stretches(20, 60, 250, 0.9)
    narrow, wide = (
        np.mean([np.ptp([band.low, band.high], axis=0) for band in (window_band(one, np.full(60, 250.0), run_windows=run) for one in hits)])
        for run in (1, 10)
    )
    assert wide > 1.5 * narrow


def test_a_sample_of_everything_is_sure() -> None:
    chains = zipf(500, 3000, 2)
    band = jackknife_band(lambda fold: ESTIMATORS["shards"](chains, rate=1.0, fold=fold), [50, 200], rate=1.0, shards=8)
    assert band.low.tolist() == band.ratio.tolist() == band.high.tolist()
    assert band.ratio.tolist() == ESTIMATORS["olken"](chains).hit_ratio([50, 200]).tolist()


def test_windows_all_alike_are_sure() -> None:
    band = window_band(np.full((12, 3), 5.0), np.full(12, 10.0))
    assert band.ratio.tolist() == [0.5] * 3
    assert band.low == pytest.approx(band.ratio) and band.high == pytest.approx(band.ratio)


def test_too_little_is_refused() -> None:
    chains = zipf(50, 100, 2)
    with pytest.raises(ValueError, match="at least 2"):
        jackknife_band(lambda fold: ESTIMATORS["shards"](chains, fold=fold), [10], rate=0.1, shards=1)
    with pytest.raises(ValueError, match="at least 2"):
        window_band(np.ones((5, 1)), np.ones(5), run_windows=3)
