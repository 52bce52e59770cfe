"""Tier surfaces beside simulated tiers, costs beside a block-by-block account, and the hull beside a simulated Talus split."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analytics.curve import Curve, DistanceHistogram
from analytics.policies import POLICIES
from analytics.reuse.chains import ChainColumns
from analytics.reuse.run_exact import Runs, RunStack
from analytics.surfaces import Hull, Tier, TierCosts, tier_edges, tier_hit_ratios
from ingest.sources import read_trace

TRACES = Path(__file__).parents[1] / ".." / "shared" / "traces" / "mooncake"
Chains = list[list[int]]


def columns(chains: Chains, block_size: int = 1) -> ChainColumns:
    prompts = [len(chain) * block_size for chain in chains]
    return ChainColumns.pack(range(len(chains)), [np.array(chain, np.uint64) for chain in chains], prompts, block_size)


def runs_and_curve(chains: ChainColumns) -> tuple[Runs, Curve]:
    histogram = DistanceHistogram(chains.block_size)
    runs = RunStack().touch(chains.ts_us, chains.offsets, chains.hashes)
    histogram.add(runs, chains)
    return runs, histogram.curve()


def tree(seed: int, requests: int, branches: int, depth: int) -> Chains:
    """Chains that descend a random tree: the id of a block says its whole path."""
    rng, chains = np.random.default_rng(seed), []
    for _ in range(requests):
        path, chain = 1, []
        for _ in range(rng.integers(1, depth + 1)):
            path = path * branches + min(int(rng.geometric(0.5)) - 1, branches - 1)
            chain.append(path)
        chains.append(chain)
    return chains


def simulate(chains: Chains, capacities: tuple[int, ...], inclusive: bool) -> list[list[int]]:
    """Tier that serves each block (-1: none). Requests are looked up as a whole and then touched leaf first.

    Exclusive: what a tier has no room for goes on top of the next, and what is touched comes up. Inclusive: all tiers take every touch.
    """
    tiers = [OrderedDict[int, None]() for _ in capacities]
    served = []
    for chain in chains:
        served.append([next((k for k, tier in enumerate(tiers) if block in tier), -1) for block in chain])
        for block in reversed(chain):
            if not inclusive:
                for tier in tiers:
                    tier.pop(block, None)
            moved: int | None = block
            for tier, capacity in zip(tiers, capacities, strict=True):
                if inclusive:
                    tier.pop(block, None)
                    moved = block
                if moved is not None:
                    tier[moved] = None
                    moved = tier.popitem(last=False)[0] if len(tier) > capacity else None
    return served


def ratios(served: list[list[int]], tiers: int) -> list[float]:
    flat = np.array([tier for row in served for tier in row])
    return [float((flat == k).mean()) for k in range(tiers)]


# ---------------------------------------------------------------- hits


@pytest.mark.parametrize("inclusive", [False, True])
def test_two_tiers_equal_their_simulation_on_a_grid_of_eight_by_eight(inclusive: bool) -> None:
    chains = tree(1, 600, 4, 8)
    _, curve = runs_and_curve(columns(chains))
    grid = [0, 1, 3, 10, 30, 80, 200, 500]
    surface = tier_hit_ratios(curve, [grid, grid], inclusive=inclusive)
    simulated = [[ratios(simulate(chains, (c1, c2), inclusive), 2) for c2 in grid] for c1 in grid]
    assert np.abs(surface - np.moveaxis(np.array(simulated), 2, 0)).max() < 1e-12
    assert 0.5 < surface.sum(axis=0).max() < 1


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 40), min_size=1, max_size=3), st.booleans())
def test_one_to_three_tiers_equal_their_simulation(seed: int, capacities: list[int], inclusive: bool) -> None:
    chains = tree(seed, 60, 3, 5)
    _, curve = runs_and_curve(columns(chains))
    surface = tier_hit_ratios(curve, [[c] for c in capacities], inclusive=inclusive).reshape(len(capacities))
    assert surface == pytest.approx(ratios(simulate(chains, tuple(capacities), inclusive), len(capacities)), abs=1e-12)


@pytest.mark.traces
def test_two_tiers_equal_their_simulation_on_mooncake() -> None:
    path = TRACES / "mooncake_trace_1000.jsonl.zst"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    chains = [request.chain.tolist() for request in read_trace([str(path)], "mooncake")]
    _, curve = runs_and_curve(columns(chains))
    grid = np.geomspace(50, 12_000, 8).round().astype(int).tolist()
    surface = tier_hit_ratios(curve, [grid, grid])
    simulated = np.array([[ratios(simulate(chains, (c1, c2), False), 2) for c2 in grid] for c1 in grid])
    assert np.abs(surface - np.moveaxis(simulated, 2, 0)).max() < 0.005


def test_edges_and_shapes() -> None:
    assert tier_edges([[1, 5], [2, 3]]).tolist() == [[[1, 1], [5, 5]], [[3, 4], [7, 8]]]
    assert tier_edges([[1, 5], [2, 3]], inclusive=True).tolist() == [[[1, 1], [5, 5]], [[2, 3], [5, 5]]]
    for bad in ([], [[3], [-1]]):
        with pytest.raises(ValueError, match="tier"):
            tier_edges(bad)


# ---------------------------------------------------------------- costs

TIERS = [Tier("hbm"), Tier("dram", 2e9, 1e-4), Tier("ssd", 2e8, 2e-3)]
COST, BYTES_PER_TOKEN, BLOCK = (4e-5, 2e-6), 1e5, 16


@pytest.mark.parametrize("inclusive", [False, True])
def test_cost_equals_an_account_block_by_block(inclusive: bool) -> None:
    chains = tree(3, 150, 3, 30)
    data = columns(chains, BLOCK)
    runs, _ = runs_and_curve(data)
    costs = TierCosts(TIERS, BYTES_PER_TOKEN, COST)
    costs.add(runs, data)
    grids = [[0, 20], [10, 40], [0, 60]]
    surface = costs.surface_s(grids, inclusive=inclusive)
    loaded = recomputed = 0
    for i, j, k in np.ndindex(2, 2, 2):
        total = 0.0
        for row in simulate(chains, (grids[0][i], grids[1][j], grids[2][k]), inclusive):
            for position, tier in enumerate(row):
                compute = COST[0] * BLOCK + COST[1] * BLOCK * (position * BLOCK + BLOCK / 2)
                load = TIERS[tier].latency_s + BLOCK * BYTES_PER_TOKEN / TIERS[tier].bandwidth_bytes_s
                loaded, recomputed = loaded + (tier > 0 and load < compute), recomputed + (tier > 0 and load >= compute)
                total += min(load, compute) if tier >= 0 else compute
        assert surface[i, j, k] == pytest.approx(total, rel=1e-9)
    assert loaded and recomputed


def test_a_block_is_loaded_where_that_is_cheaper_and_only_there() -> None:
    """One chain of ten blocks of one token asked for twice: recomputing block i takes 1 + i + 0.5, loading one takes 4.5."""
    data = columns([list(range(100, 110))] * 2)
    runs, _ = runs_and_curve(data)
    costs = TierCosts([Tier("dram", 2.0, 0.5)], 8.0, (1.0, 1.0))
    costs.add(runs, data)
    whole = 10 + 50
    assert costs.recompute_s == 2 * whole
    assert costs.surface_s([[0, 10]]).tolist() == [2 * whole, whole + (1.5 + 2.5 + 3.5) + 7 * 4.5]
    with pytest.raises(ValueError, match="grids"):
        costs.surface_s([[1], [2]])
    with pytest.raises(ValueError, match="bandwidth"):
        TierCosts([Tier("dram", 0.0)], 1.0, (1.0, 0.0))


def test_a_tail_block_counts_its_own_tokens_and_batches_add_up() -> None:
    data = ChainColumns.pack([0, 1], [np.array([1, 2], np.uint64)] * 2, [20, 20], 16)
    costs = TierCosts([Tier("hbm")], 1.0, (1.0, 0.0))
    costs.add(runs_and_curve(data)[0], data)
    assert costs.surface_s([[0, 1, 2]]).tolist() == [40.0, 24.0, 20.0]
    costs.add(runs_and_curve(data)[0], data)
    assert costs.surface_s([[0, 1, 2]]).tolist() == [80.0, 48.0, 40.0]


# ---------------------------------------------------------------- hull


def test_hull_of_a_cliff_is_its_chord() -> None:
    hull = Hull.of([[0, 50, 100, 200]], np.array([1.0, 1.0, 0.2, 0.2]))
    assert hull.value([25]) == pytest.approx(0.8)
    split = hull.split([50])
    assert split.shares.tolist() == pytest.approx([0.5, 0.5]) and split.capacities.ravel().tolist() == pytest.approx([0, 50])
    assert hull.value([150]) == pytest.approx(0.2) and hull.value([10_000]) == pytest.approx(0.2)
    shifted = hull.split([50], margin_ratio=0.25)
    assert shifted.shares.tolist() == pytest.approx([0.6, 0.4]) and shifted.value == pytest.approx(0.6 + 0.4 * 0.2)
    with pytest.raises(ValueError, match="fits"):
        Hull.of([[10, 20]], np.array([0.5, 0.1])).split([5])
    with pytest.raises(ValueError, match="shape"):
        Hull.of([[10, 20]], np.zeros(3))


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6))
def test_hull_lies_below_the_surface_uses_no_more_than_is_given_and_is_convex(seed: int) -> None:
    rng = np.random.default_rng(seed)
    axes = [np.sort(rng.choice(100, 5, replace=False)) for _ in range(2)]
    surface = rng.random((5, 5))
    surface = np.minimum.accumulate(np.minimum.accumulate(surface, axis=0), axis=1)
    hull = Hull.of(axes, surface)
    for i, j in np.ndindex(5, 5):
        split = hull.split([float(axes[0][i]), float(axes[1][j])])
        assert split.value <= surface[i, j] + 1e-9
        assert (split.capacities.sum(axis=0) <= np.array([axes[0][i], axes[1][j]]) + 1e-6).all()
        assert split.shares.sum() == pytest.approx(1) and split.shares.size <= 3
    # convexity: the hull halfway between two points is no higher than halfway between their values
    low, high = np.array([axes[0][0], axes[1][0]], float), np.array([axes[0][4], axes[1][4]], float)
    assert hull.value((low + high) / 2) <= (hull.value(low) + hull.value(high)) / 2 + 1e-9


def loop_and_random(blocks: int, accesses: int, seed: int = 5) -> np.ndarray:
    """Half of the accesses loop over `blocks` ids, half are uniform over as many others: an LRU curve with a cliff."""
    rng = np.random.default_rng(seed)
    ids = (blocks + rng.integers(0, blocks, accesses)).astype(np.int32)
    ids[::2] = np.arange(ids[::2].size) % blocks
    return ids


def simulated_split(ids: np.ndarray, n_ids: int, shares: np.ndarray, capacities: np.ndarray, seed: int) -> float:
    """Miss ratio of an exclusive stack of tiers split into partitions by a random draw of the ids."""
    part = np.searchsorted(np.cumsum(shares), np.random.default_rng(seed).random(n_ids))[ids]
    hits = sum(int(POLICIES["lru"](ids[part == k], n_ids, round(float(c.sum()))).sum()) for k, c in enumerate(capacities))
    return 1 - hits / ids.size


@pytest.mark.parametrize("target", [(200, 600), (500, 1000), (100, 2500)])
def test_the_hull_promises_no_more_than_a_talus_split_delivers(target: tuple[int, int]) -> None:
    """Two exclusive tiers over 4,000 blocks, on a curve with a cliff.

    Sampling error: the share s of the ids that a partition gets deviates by sqrt(s(1-s)/4000) < 0.8 %, and its load with it. Without a
    margin that costs up to 1 point at the cliff (seen over 8 draws), with 5 % nothing; 0.2 points are left for chance.
    """
    ids = loop_and_random(2000, 60_000)
    grid = np.arange(0, 4401, 400)
    misses = np.array([[1 - POLICIES["lru"](ids, 4000, int(c1 + c2)).mean() for c2 in grid] for c1 in grid])
    hull = Hull.of([grid, grid], misses)
    split = hull.split(target, margin_ratio=0.05)
    plain = 1 - POLICIES["lru"](ids, 4000, sum(target)).mean()
    delivered = [simulated_split(ids, 4000, split.shares, split.capacities, seed) for seed in range(5)]
    assert max(delivered) <= split.value + 0.002
    assert np.mean(delivered) < plain - 0.05
