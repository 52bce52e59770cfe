"""Closed forms and identities under the diagnosis: detector, decomposition, Shapley, AET pool, queue."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.optimize import brentq

from analytics.detectors import DETECTORS, best_stretch, load_change, step
from analytics.identity import bootstrap, decompose, interval, prefill_seconds, resample, scale_to, shapley
from analytics.pool import PoolChange, ReuseHistogram, characteristic_time_s, instances_hit_ratio, pooled_hit_ratio, solve
from analytics.queueing import Queue


def ar1(n: int, correlation: float, rng: np.random.Generator) -> np.ndarray:
    noise = rng.standard_normal(n)
    for t in range(1, n):
        noise[t] = correlation * noise[t - 1] + math.sqrt(1 - correlation**2) * noise[t]
    return noise


# --- detectors ---------------------------------------------------------------------------------------------------------------------


def slow_stretch(x: np.ndarray, w: np.ndarray, least: int, direction: int, recovers: bool) -> tuple[float, int, int]:
    best = (0.0, 0, 0)
    total = float((w * (x - np.average(x, weights=w)) ** 2).sum())
    for i in range(least, len(x) - least + 1):
        for j in range(i + least if recovers else len(x), len(x) + 1):
            inside = np.zeros(len(x), bool)
            inside[i:j] = True
            if len(x) - j < least and j != len(x):
                continue
            levels = np.where(inside, np.average(x[inside], weights=w[inside]), np.average(x[~inside], weights=w[~inside]))
            moved = levels[i] - levels[0]
            gain = 1 - float((w * (x - levels) ** 2).sum()) / total
            if direction * moved >= 0 and gain > best[0] + 1e-12:
                best = (gain, i, j)
    return best


@settings(max_examples=60, deadline=None)
@given(st.integers(6, 25), st.integers(0, 10_000), st.sampled_from([-1, 0, 1]), st.booleans())
def test_kernel_agrees_with_direct_least_squares(n: int, seed: int, direction: int, recovers: bool) -> None:
    rng = np.random.default_rng(seed)
    x, w = rng.random(n), rng.random(n) + 0.1
    fast, slow = best_stretch(x, w, 3, direction, recovers), slow_stretch(x, w, 3, direction, recovers)
    assert fast[0] == pytest.approx(slow[0], abs=1e-9)
    assert fast[1:] == slow[1:]


@pytest.mark.parametrize("detector", DETECTORS)
def test_golden_step(detector: str) -> None:
    rng = np.random.default_rng(7)
    ratio = np.where(np.arange(40) < 23, 0.7, 0.62) + rng.normal(0, 0.01, 40)
    change = DETECTORS[detector](ratio, np.ones(40), rng)
    assert change is not None and (change.onset, change.end) == (23, 40)
    assert change.before == pytest.approx(0.70, abs=0.005) and change.after == pytest.approx(0.62, abs=0.005)
    assert change.p_value <= 0.01


def test_golden_dip_and_directions() -> None:
    rng = np.random.default_rng(3)
    ratio = 0.7 + rng.normal(0, 0.01, 40)
    ratio[20:26] -= 0.15
    dip = DETECTORS["dip"](ratio, np.ones(40), rng)
    assert dip is not None and (dip.onset, dip.end) == (20, 26)
    assert step(1 - ratio, np.ones(40), rng, recovers=True) is None
    assert step(1 - ratio, np.ones(40), rng, recovers=True, direction=1) is not None


@pytest.mark.parametrize("detector", DETECTORS)
@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_false_alarms_on_noise_stay_rare(detector: str, correlation: float) -> None:
    """At a nominal 1 %, with no help from the minimal effect: at most 1.5 % on white noise and 6 % on AR(1) 0.5 (plus sampling error)."""
    alarms = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        series = 0.6 + 0.02 * ar1(45, correlation, rng)
        alarms += step(series, np.ones(45), rng, recovers=detector == "dip", min_effect=0.0, simulations=199) is not None
    assert alarms <= (6 if correlation == 0 else 16)


def test_detector_ignores_small_short_empty_and_missing() -> None:
    rng = np.random.default_rng(0)
    small = np.where(np.arange(40) < 20, 0.70, 0.69)
    assert step(small, np.ones(40), rng) is None
    assert step(np.array([0.9, 0.1, 0.1]), np.ones(3), rng) is None
    assert step(np.full(40, 0.5), np.ones(40), rng) is None
    assert step(np.full(40, np.nan), np.zeros(40), rng) is None
    gap = np.where(np.arange(40) < 20, 0.7, 0.5) + rng.normal(0, 0.01, 40)
    gap[10:14] = np.nan
    change = step(gap, np.ones(40), rng)
    assert change is not None and change.onset == 20


def test_heavy_windows_weigh_more() -> None:
    ratio, weight = np.full(30, 0.7), np.ones(30)
    ratio[15:] = 0.5
    ratio[20:25] = 0.9
    weight[20:25] = 1e-3
    change = step(ratio + np.random.default_rng(1).normal(0, 0.005, 30), weight, np.random.default_rng(1))
    assert change is not None and change.onset == 15 and change.after == pytest.approx(0.5, abs=0.01)


def test_load_change() -> None:
    before, after = np.arange(10) < 5, np.arange(10) >= 5
    series = np.where(before, 100.0, 109.0)
    assert load_change(series, series, before, after).flat
    assert not load_change(series * np.where(after, 1.02, 1.0), series, before, after).flat
    assert not load_change(np.where(before, 0.0, 1.0), series, before, after).flat


# --- identity ----------------------------------------------------------------------------------------------------------------------

tables = arrays(np.int64, (4, 6), elements=st.one_of(st.just(0), st.integers(0, 10**9)))


@settings(max_examples=200, deadline=None)
@given(tables, tables)
def test_decomposition_has_no_remainder(before: np.ndarray, after: np.ndarray) -> None:
    split = decompose(before, after)
    assert abs(float(split.mix.sum() + split.within.sum() - split.change)) < 1e-12
    for side, ratio in ((before, split.ratio_before), (after, split.ratio_after)):
        assert not side.sum() or abs(float(ratio) - side[:, 0].sum() / side.sum()) < 1e-12
    assert (before.sum() and after.sum()) or split.change == 0


@settings(max_examples=50, deadline=None)
@given(tables, tables, st.floats(0, 1), st.floats(0, 1e-4))
def test_decomposition_holds_in_prefill_seconds(before: np.ndarray, after: np.ndarray, a: float, b: float) -> None:
    first, second = (prefill_seconds(side, side * 1500.0, a, b) for side in (before, after))
    split = decompose(first, second)
    assert abs(float(split.mix.sum() + split.within.sum() - split.change)) < 1e-12


def test_decomposition_by_hand() -> None:
    split = decompose(np.array([[60, 40], [10, 90]]), np.array([[50, 50], [10, 90]]))
    assert split.within[0, 1] == pytest.approx(-0.5 * 0.1) and split.within[1, 1] == 0 and not split.mix.any()
    moved = decompose(np.array([[60, 40], [0, 0]]), np.array([[60, 40], [0, 100]]))
    assert moved.mix.sum() == pytest.approx(-0.3) and not moved.within.any()


def test_shapley_is_efficient_symmetric_and_ignores_dummies() -> None:
    glove = shapley(3, lambda s: np.array(float(0 in s and (1 in s or 2 in s))))
    assert glove == pytest.approx([2 / 3, 1 / 6, 1 / 6])
    assert shapley(3, lambda s: np.array(3.0 * (0 in s) + 1.0 * (1 in s))) == pytest.approx([3, 1, 0])


def test_scale_to_is_scaling_with_one_sign_and_bounded_with_two() -> None:
    equal = np.array([1 / 3, 1 / 3, 1 / 3])[:, None]
    assert scale_to(np.array([1.0, 2.0, 1.0])[:, None], np.array([8.0]), equal).ravel() == pytest.approx([2, 4, 2])
    mixed = scale_to(np.array([1.0, -1.0, 0.0])[:, None], np.array([0.5]), equal).ravel()
    assert mixed.sum() == pytest.approx(0.5) and np.abs(mixed).max() <= 1.5
    assert scale_to(np.zeros((3, 1)), np.array([0.9]), np.array([1.0, 0.0, 0.0])[:, None]).ravel() == pytest.approx([0.9, 0, 0])


def test_bootstrap_interval_covers_and_autocorrelation_widens_it() -> None:
    rng = np.random.default_rng(5)
    counts = resample(20, 300, rng)
    assert (counts.sum(axis=1) == 20).all()
    covered = 0
    for seed in range(60):
        noise = np.random.default_rng(seed)
        hit = np.round(1000 * (0.6 + 0.03 * noise.standard_normal((24, 1)))).astype(np.int64)
        table = np.stack([hit, 1000 - hit], axis=2)
        low, high = interval(bootstrap(table[:12], table[12:], noise, draws=200).change)
        covered += low <= 0 <= high
    assert covered >= 48
    steady = np.tile(np.array([[[600, 400]]]), (10, 1, 1))
    assert interval(bootstrap(steady, steady, rng).change) == (0.0, 0.0)


# --- pool --------------------------------------------------------------------------------------------------------------------------


def independent(probability: np.ndarray, rate: float, duration_s: float = 100.0) -> ReuseHistogram:
    """Reuse times of independent Poisson references, as fine bins of the exact mixture of exponentials."""
    edges = np.concatenate([[0.0], np.geomspace(1e-4, 60.0 / (rate * probability.min()), 3000)])
    tail = (probability * np.exp(-rate * probability * edges[:, None])).sum(axis=1)
    blocks = -np.diff(tail) * rate * duration_s
    return ReuseHistogram(edges[:-1], edges[1:], blocks, 0.0, duration_s)


def che(probabilities: list[np.ndarray], rates: list[float], capacity: float) -> list[float]:
    def filled(t: float) -> float:
        return sum(float((1 - np.exp(-r * p * t)).sum()) for p, r in zip(probabilities, rates, strict=True)) - capacity

    time_s = brentq(filled, 0, 1e9)
    return [float((p * (1 - np.exp(-r * p * time_s))).sum()) for p, r in zip(probabilities, rates, strict=True)]


def zipf(n: int, alpha: float) -> np.ndarray:
    weights = np.arange(1, n + 1) ** -alpha
    return weights / weights.sum()


@pytest.mark.parametrize("capacity", [50, 200, 800, 2000])
def test_pool_of_independent_references_is_che(capacity: int) -> None:
    popular, flat = zipf(1500, 1.0), zipf(1500, 0.6)
    expected = che([popular, flat], [50.0, 20.0], capacity)
    found = solve([independent(popular, 50.0), independent(flat, 20.0)], capacity)
    assert found.hit_ratio == pytest.approx(expected, rel=0.01)
    assert found.occupancy_blocks.sum() == pytest.approx(capacity, rel=0.01)


def test_pool_agrees_with_a_real_shared_lru() -> None:
    rng = np.random.default_rng(4)
    n, duration_s, rates = 60_000, 600.0, (70.0, 30.0)
    who = (rng.random(n) < 0.3).astype(int)
    keys = np.where(who == 0, rng.choice(800, n, p=zipf(800, 0.9)), 10_000 + rng.choice(2000, n, p=zipf(2000, 0.5)))
    times = np.sort(rng.uniform(0, duration_s, n))
    recent: dict[int, float] = {}
    hits, reuse, cold = np.zeros(2), [[], []], [0, 0]
    seen: dict[int, float] = {}
    for key, tenant, now in zip(keys.tolist(), who.tolist(), times.tolist(), strict=True):
        if key in seen:
            reuse[tenant].append(now - seen[key])
        else:
            cold[tenant] += 1
        seen[key] = now
        hits[tenant] += key in recent
        recent.pop(key, None)
        recent[key] = now
        if len(recent) > 500:
            del recent[next(iter(recent))]
    edges = np.concatenate([[0.0], np.geomspace(1e-3, duration_s, 400)])
    histograms = [ReuseHistogram(edges[:-1], edges[1:], np.histogram(r, edges)[0] * 1.0, float(c), duration_s)
                  for r, c in zip(reuse, cold, strict=True)]  # fmt: skip
    observed = hits / np.bincount(who)
    assert solve(histograms, 500).hit_ratio == pytest.approx(observed, abs=0.01)
    assert rates[0] > rates[1]


def test_cyclic_scan_hits_all_or_nothing() -> None:
    scan = ReuseHistogram(np.array([9.999]), np.array([10.0]), np.array([5000.0]), 0.0, 50.0)
    assert pooled_hit_ratio([scan], 990) == 0.0
    assert pooled_hit_ratio([scan], 1001) == 1.0
    assert math.isinf(characteristic_time_s([scan], 1001))
    assert solve([scan], 1001).occupancy_blocks[0] == pytest.approx(1000, rel=1e-3)


def test_pool_edge_cases() -> None:
    empty = ReuseHistogram(np.zeros(0), np.zeros(0), np.zeros(0), 0.0, 60.0)
    cold = ReuseHistogram(np.zeros(0), np.zeros(0), np.zeros(0), 600.0, 60.0)
    assert pooled_hit_ratio([], 10) == 0.0 and pooled_hit_ratio([empty], 10) == 0.0 and pooled_hit_ratio([cold], 10) == 0.0
    assert characteristic_time_s([cold], 100) == pytest.approx(10.0)
    assert characteristic_time_s([cold], 0) == 0.0
    assert instances_hit_ratio({}, {}, 3) == (0.0, pytest.approx([]))


def test_more_capacity_never_hurts_and_instances_scale_it() -> None:
    histograms = [independent(zipf(900, 0.8), 40.0)]
    curve = [pooled_hit_ratio(histograms, c) for c in np.linspace(0, 1000, 40)]
    assert (np.diff(curve) >= -1e-12).all()
    placed = {f"p{i}": histograms for i in range(4)}
    fleet, tenants = instances_hit_ratio(placed, dict.fromkeys(placed, 200.0), 6)
    assert fleet == pytest.approx(pooled_hit_ratio(histograms, 300.0)) == tenants[0]


def test_players_name_capacity_own_reuse_or_neighbours() -> None:
    calm, wide = independent(zipf(1000, 0.8), 30.0), independent(zipf(4000, 0.6), 120.0)
    cut = PoolChange([calm, calm], [calm, calm], 800.0, 300.0).players()
    assert cut[0] == pytest.approx(solve([calm, calm], 800).hit_ratio - solve([calm, calm], 300).hit_ratio, abs=0.002)
    assert np.abs(cut[1:]).max() < 1e-9
    change = PoolChange([calm, calm], [calm, wide], 800.0, 800.0)
    noisy = change.players()
    assert noisy[2, 0] > 0.05 and abs(noisy[0, 0]) + abs(noisy[1, 0]) < 1e-9
    assert noisy[1, 1] > 0.05
    influence = change.influence()
    assert influence[1, 0] == pytest.approx(noisy[2, 0]) and np.abs(influence[0]).max() < 1e-9


# --- queue -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rho", [0.1, 0.5, 0.8, 0.95])
def test_queue_is_mm1_and_md1(rho: float) -> None:
    mm1, md1 = Queue(rho / 2.0, 2.0, 1.0), Queue(rho / 2.0, 2.0, 0.0)
    assert mm1.utilisation == pytest.approx(rho)
    assert mm1.wait_s == pytest.approx(rho / (0.5 * (1 - rho)))
    assert md1.wait_s == pytest.approx(mm1.wait_s / 2)
    exact = max(0.0, math.log(rho / 0.01) / (0.5 * (1 - rho)))
    assert mm1.wait_quantile_s(0.99) == pytest.approx(exact)


def test_queue_tail_matches_a_simulation() -> None:
    rng = np.random.default_rng(1)
    n, service = 200_000, 0.7
    gaps, waits = rng.exponential(1.0, n), np.zeros(n)
    for i in range(1, n):
        waits[i] = max(0.0, waits[i - 1] + service - gaps[i])
    queue = Queue(1.0, service, 0.0)
    assert queue.wait_s == pytest.approx(waits.mean(), rel=0.05)
    assert queue.wait_quantile_s(0.99) == pytest.approx(np.quantile(waits, 0.99), rel=0.15)


def test_queue_knee_fit_and_degenerate_inputs() -> None:
    assert Queue(1, 0.1, 1.0).knee_utilisation == 0.5
    assert Queue(1, 0.1, 0.0).knee_utilisation == pytest.approx(0.5858, abs=1e-4)
    queue = Queue(0.5, 1.0)
    assert queue.fitted(2.5).wait_s == pytest.approx(2.5) and queue.fitted(None) == queue
    assert queue.fitted(1e9).scale == 20.0 and queue.fitted(float("nan")) == queue
    assert math.isinf(Queue(2.0, 1.0).wait_s) and math.isinf(Queue(2.0, 1.0).wait_quantile_s(0.99))
    assert Queue(0.0, 1.0).wait_s == 0.0 and Queue(0.0, 1.0).wait_quantile_s(0.99) == 0.0 and Queue(0.0, 1.0).fitted(1.0).scale == 1.0
    with pytest.raises(ValueError, match="negative"):
        Queue(-1.0, 1.0)
