"""What learned policies must learn, and the trees that they learn with."""

from __future__ import annotations

import numpy as np
import pytest

from analytics.policies import POLICIES
from analytics.policies.boosting import BINS, fit, make_forest, predict
from analytics.policies.cursor import bare
from analytics.policies.sketch import add, estimate, halve, make_sketch

SEEDED = ("lrb", "3l_cache", "halp", "hyperbolic", "la_cache", "rfb", "lhd", "cacheus")


def hot_and_scanned(length: int = 60_000, hot: int = 300) -> np.ndarray:
    """Every second access one of `hot` blocks that come round in turn, the others blocks that never return."""
    ids = np.arange(length, dtype=np.int32) + hot
    ids[::2] = (np.arange(length // 2) * 7) % hot
    return ids


def test_trees_learn_a_step_and_a_sum() -> None:
    rng = np.random.default_rng(0)
    forest = make_forest(2000, 3)
    forest.x[:] = rng.integers(0, BINS, (2000, 3))
    forest.y[:] = np.where(forest.x[:, 0] > 30, 5.0, -5.0) + 0.05 * forest.x[:, 2]
    fit(forest, 2000)
    fresh = rng.integers(0, BINS, (500, 3)).astype(np.uint8)
    truth = np.where(fresh[:, 0] > 30, 5.0, -5.0) + 0.05 * fresh[:, 2]
    error = np.array([predict(forest, row) for row in fresh]) - truth
    assert np.sqrt(np.mean(error**2)) < 0.5 < np.std(truth) / 5


def test_trees_of_a_constant_say_it() -> None:
    forest = make_forest(100, 2)
    forest.y[:] = 3.5
    fit(forest, 100)
    assert predict(forest, np.array([9, 9], np.uint8)) == pytest.approx(3.5)


@pytest.mark.parametrize("name", ["lrb", "3l_cache"])
def test_a_scan_does_not_drive_out_what_comes_round(name: str) -> None:
    """An LRU of 400 never hits here: 600 blocks lie between two uses. Keeping the hot ones hits half of all accesses."""
    ids = hot_and_scanned()
    late = slice(ids.size // 2, None)
    hits = POLICIES[name](ids, int(ids.max()) + 1, 400)
    assert not POLICIES["lru"](ids, int(ids.max()) + 1, 400).any()
    assert hits[late].mean() > 0.2


def test_groups_that_are_hit_stay() -> None:
    """Bursts of 20 hot blocks, each asked for twice, then of 60 that never return: groups of the first kind are worth more."""
    rng, parts, fresh = np.random.default_rng(4), [], 400
    for _ in range(600):
        parts += [np.tile(20 * rng.integers(0, 20) + np.arange(20), 2), np.arange(fresh, fresh + 60)]
        fresh += 60
    ids = np.concatenate(parts).astype(np.int32)
    hits = {name: int(POLICIES[name](ids, fresh, 640)[ids.size // 2 :].sum()) for name in ("gl_cache", "fifo")}
    assert hits["gl_cache"] > 1.1 * hits["fifo"]


def test_halp_learns_which_of_two_comes_sooner() -> None:
    """300 hot blocks in random order beside a scan, in a cache of 300: losers that return teach it to let the scan go first."""
    rng = np.random.default_rng(1)
    ids = hot_and_scanned()
    ids[::2] = rng.integers(0, 300, ids[::2].size)
    late = slice(ids.size // 2, None)
    n_ids = int(ids.max()) + 1
    assert POLICIES["halp"](ids, n_ids, 300)[late].mean() > POLICIES["lru"](ids, n_ids, 300)[late].mean() + 0.01


@pytest.mark.parametrize("name", SEEDED)
def test_a_seed_decides(name: str) -> None:
    rng = np.random.default_rng(2)
    trace = bare(np.minimum(rng.zipf(1.2, 20_000), 2000).astype(np.int32), 2001)
    first, again, other = (POLICIES[name].replay(trace, 100, "plain", seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert first.mean() == pytest.approx(other.mean(), abs=0.02)


def test_a_sketch_never_says_too_little_and_forgets_by_halves() -> None:
    rng = np.random.default_rng(3)
    keys = np.minimum(rng.zipf(1.3, 5000), 800)
    sketch, times = make_sketch(8000, 4, 1 << 30), np.bincount(keys, minlength=801)
    for key in keys.tolist():
        add(sketch, key)
    said = np.array([estimate(sketch, key) for key in range(801)])
    assert np.all(said >= times) and np.mean(said == times) > 0.95
    halve(sketch)
    assert estimate(sketch, 1) == said[1] // 2
