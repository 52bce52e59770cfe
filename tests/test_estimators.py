"""Estimators of the curve: one contract over the registry, closed forms, slow oracles of the sampled stacks, and right answers of traces.

Errors are mean absolute errors over 40 capacities, evenly spaced in logarithm from a thousandth of the distinct blocks to all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq

from analytics.curve import Curve
from analytics.estimators import ESTIMATORS, parameters
from analytics.estimators.counter_stacks import _cardinality
from analytics.estimators.exact import windows
from analytics.estimators.points import Sample, block_values
from analytics.estimators.sampling import P, mixed, salt_of, value_of
from analytics.estimators.shards_hot import most_frequent, space_saving
from analytics.estimators.weighted import weighted
from analytics.reuse.chains import ChainBuilder, ChainColumns
from ingest.sources import read_trace

TRACES = Path(__file__).parents[1] / ".." / "shared" / "traces"
F64 = npt.NDArray[np.float64]

# Parameters with which an estimator samples or models nothing away.
SURE: dict[str, dict[str, Any]] = {
    "run_exact": {},
    "olken": {},
    "weighted": {},
    "shards": {"rate": 1.0},
    "shards_fixed": {"s_max": 10**6},
    "shards_hot": {"rate": 1.0},
    "lashards": {"keys": 10**6},
    "flows": {"front": 10**6},
}
# What estimators are asked on closed forms, and how near they must come.
CLOSED: dict[str, tuple[dict[str, Any], float]] = {
    **{name: (given_, 0.01) for name, given_ in SURE.items()},
    "shards at 30 %": ({"rate": 0.3}, 0.04),
    "shards at 30 % raw": ({"rate": 0.3, "adj": False}, 0.04),
    "shards_fixed of 1000": ({"s_max": 1000}, 0.05),
    "shards_hot at 30 %": ({"rate": 0.3, "hot": 100}, 0.04),
    "lashards of 1000": ({"keys": 1000, "window_blocks": 4000}, 0.04),
    "flows at 30 %": ({"rate": 0.3}, 0.05),
    "aet": ({}, 0.01),
    "statstack": ({"rate": 1.0}, 0.03),
    "counter_stacks": ({}, 0.04),
}


def columns(chains: list[list[int]], block_size: int = 1) -> ChainColumns:
    """Chains of full blocks, one a second."""
    builder = ChainBuilder(block_size)
    for i, chain in enumerate(chains):
        builder.append(i * 1_000_000, np.array(chain, np.uint64), len(chain) * block_size)
    return builder.build()


def references(keys: npt.NDArray[Any]) -> ChainColumns:
    """Every key a request of its own."""
    n = keys.size
    return ChainColumns(np.arange(n), np.arange(n + 1), keys.astype(np.uint64), np.ones(n, np.int64), 1)


def zipf(distinct: int, count: int, exponent: float, seed: int) -> tuple[ChainColumns, F64]:
    """Independent references and their popularity."""
    popularity = 1.0 / np.arange(1, distinct + 1) ** exponent
    popularity /= popularity.sum()
    return references(np.searchsorted(np.cumsum(popularity), np.random.default_rng(seed).random(count))), popularity


def grid(chains: ChainColumns, points: int = 40) -> npt.NDArray[np.int64]:
    distinct = np.unique(chains.hashes).size
    return np.unique(np.geomspace(max(distinct / 1000, 1), distinct, points).round().astype(np.int64))


def mean_error(curve: Curve, exact: Curve, sizes: npt.NDArray[np.int64]) -> float:
    return float(np.abs(curve.hit_ratio(sizes) - exact.hit_ratio(sizes)).mean())


def closed(label: str) -> tuple[Any, float]:
    """The estimator of a row of CLOSED as a function of chains, and its tolerance."""
    given_, tolerance = CLOSED[label]
    return lambda chains: ESTIMATORS[label.split()[0]](chains, **given_), tolerance


@pytest.fixture(scope="module")
def prefix_tree() -> ChainColumns:
    """Conversations that grow, share heads and end in partial blocks, with tokens beyond the last full block now and then."""
    rng, builder = np.random.default_rng(8), ChainBuilder(16)
    for i in range(1500):
        head, talk = int(rng.integers(0, 4)), int(rng.integers(0, 60))
        blocks = [*range(head * 100, head * 100 + 5), *range(10_000 + 100 * talk, 10_000 + 100 * talk + int(rng.integers(1, 40)))]
        builder.append(i * 1000, np.array(blocks, np.uint64), 16 * len(blocks) - int(rng.integers(-4, 12)))
    return builder.build()


# ---------------------------------------------------------------- the contract


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
def test_curves_keep_the_contract(name: str, prefix_tree: ChainColumns) -> None:
    curve = ESTIMATORS[name](prefix_tree)
    exact = ESTIMATORS["olken"](prefix_tree)
    assert (curve.total_blocks, curve.total_tokens, curve.total_token_context) == (
        exact.total_blocks,
        exact.total_tokens,
        exact.total_token_context,
    )
    assert np.all(np.diff(curve.distances) > 0)
    for weight in ("blocks", "tokens", "cost"):
        ratios = curve.hit_ratio(np.arange(1, 4000), weight, (1e-5, 1e-9))
        assert ratios.shape == (3999,) and np.all(np.diff(ratios) >= 0) and ratios[0] >= 0
        assert ratios[-1] <= curve.ideal_ratio(weight, (1e-5, 1e-9)) <= 1
    assert curve.hit_ratio([100, 700]).tolist() == ESTIMATORS[name](prefix_tree).hit_ratio([100, 700]).tolist()


@pytest.mark.parametrize("name", sorted(ESTIMATORS))
@pytest.mark.parametrize("chains", [[], [[]], [[], []], [[7]], [[1, 2, 3]]], ids=str)
def test_next_to_nothing(name: str, chains: list[list[int]]) -> None:
    given_chains = columns(chains) if chains else columns([[]]).slice(0, 0)
    curve = ESTIMATORS[name](given_chains)
    assert curve.total_blocks == sum(map(len, chains))
    assert curve.hit_ratio([10]).tolist() == pytest.approx([0], abs=0.34)


@pytest.mark.parametrize("name", sorted({"shards", "shards_fixed", "shards_hot", "lashards", "flows", "aet", "statstack"}))
def test_seeds_make_other_draws(name: str) -> None:
    chains, _ = zipf(3000, 20_000, 0.7, 3)
    given_: dict[str, Any] = {"keys": 100} if name == "lashards" else {"s_max": 200} if name == "shards_fixed" else {"rate": 0.05}
    one, same, other = (ESTIMATORS[name](chains, seed=seed, **given_).hit_ratio(grid(chains)).tolist() for seed in (1, 1, 2))
    assert one == same != other


def test_parameters_are_what_text_can_give() -> None:
    assert parameters("run_exact") == {}
    assert parameters("shards") == {"rate": float, "adj": bool, "seed": int}
    assert parameters("shards_hot")["hot_from"] is str and parameters("flows")["front"] is int
    assert "sizes" not in parameters("weighted") and "fold" not in parameters("flows")


@pytest.mark.parametrize(
    ("name", "given_"),
    [
        ("shards", {"rate": 0.0}),
        ("shards", {"rate": 1.5}),
        ("shards_hot", {"rate": -1.0}),
        ("shards_hot", {"hot_from": "guess"}),
        ("shards_fixed", {"s_max": 0}),
        ("lashards", {"rate_min": 0.0}),
        ("flows", {"rate": 2.0}),
        ("flows", {"slide": 1.5}),
        ("aet", {"rate": 0.0}),
        ("counter_stacks", {"precision": 3}),
        ("counter_stacks", {"delta": 1.0}),
    ],
)
def test_bad_parameters_are_refused(name: str, given_: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given_)).split("_min")[0]):
        ESTIMATORS[name](columns([[1, 2], [1, 2]]), **given_)


@st.composite
def prefix_trees(draw: st.DrawFn) -> list[list[int]]:
    chains: list[list[int]] = [[]]
    fresh = 1
    for back, keep, new in draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12), st.integers(0, 6)), max_size=30)):
        chains.append(chains[-1 - back % len(chains)][:keep] + list(range(fresh, fresh + new)))
        fresh += new
    return chains


@settings(max_examples=60, deadline=None)
@given(prefix_trees(), st.sampled_from(sorted(SURE)), st.integers(1, 5))
def test_with_all_blocks_tracked_estimators_are_exact(chains: list[list[int]], name: str, block_size: int) -> None:
    given_chains, sizes = columns(chains, block_size), np.arange(1, 200)
    exact, curve = ESTIMATORS["olken"](given_chains), ESTIMATORS[name](given_chains, **SURE[name])
    for weight in ("blocks", "tokens", "cost"):
        assert curve.hit_ratio(sizes, weight, (3.0, 0.5)) == pytest.approx(exact.hit_ratio(sizes, weight, (3.0, 0.5)), abs=1e-12)


@pytest.mark.parametrize("name", sorted({*SURE, "aet"}))
def test_other_names_of_the_blocks_change_nothing(name: str, prefix_tree: ChainColumns) -> None:
    renamed = ChainColumns(
        prefix_tree.ts_us, prefix_tree.offsets, ~prefix_tree.hashes, prefix_tree.prompt_tokens, prefix_tree.block_size
    )  # fmt: skip
    one, two = (ESTIMATORS[name](chains, **SURE.get(name, {})).hit_ratio(grid(prefix_tree)) for chains in (prefix_tree, renamed))
    assert one.tolist() == two.tolist()


# ---------------------------------------------------------------- closed forms


@pytest.mark.parametrize("label", CLOSED)
def test_cyclic_scan(label: str) -> None:
    estimate, tolerance = closed(label)
    blocks, laps = 3000, 10
    curve = estimate(references(np.tile(np.arange(blocks), laps)))
    below, above = int(blocks * (1 - 2 * tolerance)), int(blocks * (1 + 2 * tolerance)) + 1
    assert curve.hit_ratio([1, below // 2, below, above]) == pytest.approx([0, 0, 0, 1 - 1 / laps], abs=tolerance)


def test_cyclic_scan_is_exact_by_reuse_times_alone() -> None:
    blocks, laps = 3001, 7
    for name in ("aet", "statstack"):
        curve = ESTIMATORS[name](references(np.tile(np.arange(blocks), laps)), rate=1.0)
        assert curve.hit_ratio([blocks - 1, blocks]).tolist() == pytest.approx([0, 1 - 1 / laps])


@pytest.mark.parametrize("label", CLOSED)
def test_uniform_references(label: str) -> None:
    estimate, tolerance = closed(label)
    blocks, count = 4000, 120_000
    curve = estimate(references(np.random.default_rng(11).integers(0, blocks, count)))
    sizes = np.arange(200, blocks, 200)
    cold = blocks / count
    assert curve.hit_ratio(sizes) == pytest.approx((1 - cold) * sizes / blocks, abs=tolerance + cold)


@pytest.mark.parametrize("label", CLOSED)
def test_zipf_references_agree_with_che(label: str) -> None:
    """Che: an LRU of c blocks holds what came within T, with the sum of 1 - exp(-p T) = c; cold misses come on top."""
    estimate, tolerance = closed(label)
    chains, p = zipf(3000, 150_000, 0.8, 12)
    sizes = np.array([100, 300, 1000, 2000])
    times = [brentq(lambda t, c=c: float((1 - np.exp(-p * t)).sum()) - c, 0, 1e9) for c in sizes]
    che = np.array([1 - (p * np.exp(-p * t)).sum() for t in times])
    cold = 3000 / 150_000
    assert estimate(chains).hit_ratio(sizes) == pytest.approx(che, abs=tolerance + cold)


@pytest.mark.parametrize("label", CLOSED)
def test_two_traces_with_disjoint_keys(label: str) -> None:
    estimate, tolerance = closed(label)
    keys = np.random.default_rng(2).integers(0, 2000, 40_000)
    both, one = estimate(references(np.concatenate([keys, keys + 10**6]))), estimate(references(keys))
    sizes = [200, 600, 1500, 2500]
    assert both.hit_ratio(sizes) == pytest.approx(one.hit_ratio(sizes), abs=2 * tolerance)


def test_error_shrinks_with_the_root_of_the_rate() -> None:
    chains = references(np.random.default_rng(5).integers(0, 2000, 20_000))
    spread = [
        np.std([ESTIMATORS["shards"](chains, rate=rate, adj=False, seed=seed).hit_ratio([1000])[0] for seed in range(40)])
        for rate in (0.05, 0.45)
    ]
    assert 2.5 < spread[0] / spread[1] < 6.0  # sqrt(0.95 / 0.05) / sqrt(0.55 / 0.45) = 3.9


def test_hot_set_takes_the_error_of_popular_blocks_away() -> None:
    """Scaled down from 571,000 keys and 5 million references for the time it takes; the slow test below is the whole."""
    chains, _ = zipf(100_000, 500_000, 1.0, 1)
    exact, sizes = ESTIMATORS["olken"](chains), grid(chains)
    hot, plain = (
        np.mean([mean_error(ESTIMATORS[name](chains, rate=0.01, seed=seed), exact, sizes) for seed in range(8)])
        for name in ("shards_hot", "shards")
    )
    assert hot <= 0.01 and hot < plain / 2


@pytest.mark.slow
def test_hot_set_on_zipf_at_1_percent() -> None:
    chains, _ = zipf(571_000, 5_000_000, 1.0, 1)
    exact, sizes = ESTIMATORS["olken"](chains), grid(chains)
    errors = [mean_error(ESTIMATORS["shards_hot"](chains, rate=0.01, seed=seed), exact, sizes) for seed in range(8)]
    assert np.mean(errors) <= 0.01, errors


# ---------------------------------------------------------------- slow oracles


def value(key: int, seed: int) -> int:
    """Sampling hash value of a block."""
    return int(value_of(np.uint64(mixed(np.uint64(key), salt_of(seed)))))


def curve_of_points(chains: ChainColumns, points: list[tuple[int, float, float]]) -> Curve:
    at, distance, weight = (np.array(column) for column in zip(*points, strict=True)) if points else (np.empty(0),) * 3
    return Sample(at.astype(np.int64), distance.astype(np.float64), weight.astype(np.float64)).curve(chains, adj=True)


def fixed_oracle(chains: ChainColumns, s_max: int, seed: int) -> Curve:
    """SHARDS of fixed size with a list for a stack."""
    stack: list[int] = []
    limit, points = P, []
    for start, end in zip(chains.offsets, chains.offsets[1:], strict=False):
        sampled = [(i, int(chains.hashes[i])) for i in range(start, end) if value(chains.hashes[i], seed) < limit]
        points += [(i, stack.index(key) * P / limit if key in stack else -1.0, P / limit) for i, key in sampled]
        for _, key in reversed(sampled):
            if value(key, seed) < limit:
                stack = [key, *(other for other in stack if other != key)]
                if len(stack) > s_max:
                    limit = max(value(other, seed) for other in stack)
                    stack = [other for other in stack if value(other, seed) < limit]
    return curve_of_points(chains, points)


def adaptive_oracle(chains: ChainColumns, keys: int, window_blocks: int, rate_min: float, seed: int) -> Curve:
    """SHARDS at a changing rate with a list of (block, weight) for a stack."""
    stack: list[tuple[int, float]] = []
    limit, points = P, []
    for first, last in windows(chains.offsets, window_blocks):
        seen = set()
        for request in range(first, last):
            sampled = [
                (i, int(chains.hashes[i]))
                for i in range(chains.offsets[request], chains.offsets[request + 1])
                if value(chains.hashes[i], seed) < limit
            ]
            order = [key for key, _ in stack]
            for i, key in sampled:
                weight = stack[order.index(key)][1] if key in order else 0.0
                points.append((i, sum(w for _, w in stack[: order.index(key)]) if key in order else -1.0, weight or P / limit))
                if weight:
                    points.append((i, -1.0, P / limit - weight))
            for _, key in reversed(sampled):
                stack = [(key, P / limit), *(item for item in stack if item[0] != key)]
                seen.add(key)
        wanted = int(limit * min(keys / len(seen), P)) if seen else limit
        before, limit = limit, min(max(wanted, round(rate_min * P)), P)
        if limit < before:
            stack = [(key, max(weight, P / limit)) for key, weight in stack if value(key, seed) < limit]
    return curve_of_points(chains, points)


@settings(max_examples=40, deadline=None)
@given(prefix_trees(), st.integers(1, 12), st.integers(0, 5))
def test_fixed_size_is_its_oracle(chains: list[list[int]], s_max: int, seed: int) -> None:
    given_chains, sizes = columns(chains), np.arange(1, 400)
    curve = ESTIMATORS["shards_fixed"](given_chains, s_max=s_max, seed=seed)
    assert curve.hit_ratio(sizes) == pytest.approx(fixed_oracle(given_chains, s_max, seed).hit_ratio(sizes), abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(prefix_trees(), st.integers(1, 12), st.integers(1, 40), st.integers(0, 5))
def test_adaptive_rate_is_its_oracle(chains: list[list[int]], keys: int, window_blocks: int, seed: int) -> None:
    given_chains, sizes = columns(chains), np.arange(1, 400) + 0.5
    curve = ESTIMATORS["lashards"](given_chains, keys=keys, window_blocks=window_blocks, rate_min=0.05, seed=seed)
    oracle = adaptive_oracle(given_chains, keys, window_blocks, 0.05, seed)
    assert curve.hit_ratio(sizes) == pytest.approx(oracle.hit_ratio(sizes), abs=1e-9)


def test_adaptive_rate_is_right_on_average() -> None:
    """A scan between two spells of reuse makes the rate fall and rise again; the mean over draws is the exact curve."""
    rng = np.random.default_rng(6)
    spells = [rng.integers(0, 1500, 12_000), np.arange(10_000, 22_000), rng.integers(0, 1500, 12_000)]
    chains = references(np.concatenate(spells))
    sizes = np.array([300, 800, 1400, 5000, 14_000])
    draws = [ESTIMATORS["lashards"](chains, keys=300, window_blocks=2000, adj=False, seed=seed).hit_ratio(sizes) for seed in range(60)]
    assert np.mean(draws, axis=0) == pytest.approx(ESTIMATORS["olken"](chains).hit_ratio(sizes), abs=0.015)


@settings(max_examples=60, deadline=None)
@given(prefix_trees(), st.data())
def test_reuse_times_are_their_oracle(chains: list[list[int]], data: st.DataObject) -> None:
    """Below 64 touches every bin holds one value, so the model is exactly mean(min(step, reuse))."""
    chains = chains[: data.draw(st.integers(1, 6))]
    touched: dict[int, int] = {}
    reuses, steps, now = [], [], 0
    for chain in chains:
        reuses += [now - 1 - touched[block] for block in chain if block in touched]
        for block in reversed(chain):
            steps.append(now - touched[block] if block in touched else None)
            touched[block], now = now, now + 1
    if now >= 64:
        return
    for name in ("aet", "statstack"):
        held = [step for step in steps if step is not None or name == "aet"]
        distances = [float(np.mean([r if step is None else min(step, r) for step in held])) for r in reuses]
        curve = ESTIMATORS[name](columns(chains), rate=1.0)
        for size in (0.25, 1.25, 2.75, 5.1, 9.3, 20.2):
            expected = sum(d < size for d in distances) / max(now, 1)
            assert curve.hit_ratio(np.array([size]))[0] == pytest.approx(expected)  # type: ignore[arg-type]


def sized_lru(keys: list[int], sizes: list[int], capacity: int) -> int:
    """Hits of an LRU of `capacity` bytes: a block hits iff all above it and itself, at their sizes of last touch and now, fit."""
    stack: list[tuple[int, int]] = []
    hits = 0
    for key, size in zip(keys, sizes, strict=True):
        place = next((i for i, item in enumerate(stack) if item[0] == key), None)
        hits += place is not None and sum(s for _, s in stack[:place]) + size <= capacity
        stack = [(key, size), *(item for item in stack if item[0] != key)]
    return hits


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 50)), max_size=60), st.integers(1, 300))
def test_sized_distances_are_their_oracle(pairs: list[tuple[int, int]], capacity: int) -> None:
    keys, sizes = [key for key, _ in pairs], [size for _, size in pairs]
    curve = weighted(references(np.array(keys, np.int64)), sizes=np.array(sizes, np.int64), unit=1)
    assert curve.hit_ratio([capacity])[0] == pytest.approx(sized_lru(keys, sizes, capacity) / max(len(pairs), 1))


def test_objects_and_bytes_are_both_right_where_sizes_differ() -> None:
    """Few blocks hold most tokens: FLOWS is right on average in both curves, and as sure of one as of the other."""
    rng = np.random.default_rng(9)
    size_of = np.where(rng.random(3000) < 0.05, 64, 2).astype(np.int32)
    keys = rng.integers(0, 3000, 40_000)
    tokens = size_of[keys]
    chains = ChainColumns(np.arange(40_000), np.arange(40_001), keys.astype(np.uint64), tokens.astype(np.int64), 4, tokens)
    exact, sizes = weighted(chains), np.array([400, 1000, 2000, 3000])

    def draws(slide: float, weight: Any) -> F64:
        return np.array([ESTIMATORS["flows"](chains, rate=0.1, slide=slide, seed=seed).hit_ratio(sizes, weight) for seed in range(60)])

    objects, in_bytes = draws(0.5, "blocks"), draws(0.5, "tokens")
    assert objects.mean(axis=0) == pytest.approx(exact.hit_ratio(sizes, "blocks"), abs=0.015)
    assert in_bytes.mean(axis=0) == pytest.approx(exact.hit_ratio(sizes, "tokens"), abs=0.015)
    assert 0.7 < objects.std(axis=0)[0] / in_bytes.std(axis=0)[0] < 1.4
    assert draws(0.9, "blocks").std(axis=0)[0] > 2 * draws(0.9, "tokens").std(axis=0)[0]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=200), st.integers(1, 40))
def test_space_saving_keeps_every_frequent_key(keys: list[int], counters: int) -> None:
    kept = set(space_saving(np.array(keys, np.uint64), counters, counters).tolist())
    for key in set(keys):
        if keys.count(key) > max(len(keys) / counters, 1):
            assert key in kept
    if counters >= len(set(keys)):
        assert kept == {key for key in keys if keys.count(key) > 1}
        best = most_frequent(np.array(keys, np.uint64), 3).tolist()
        assert sorted(map(keys.count, best)) == sorted(map(keys.count, sorted(kept, key=keys.count)[-3:]))


@pytest.mark.parametrize("distinct", [1, 10, 100, 1000, 100_000])
def test_cardinality_of_a_sketch(distinct: int) -> None:
    size, salt = 1 << 10, salt_of(1)
    registers = [0] * size
    for key in range(distinct):
        bits = int(mixed(np.uint64(key), salt))
        rest = bits >> 10
        registers[bits % size] = max(registers[bits % size], (rest & -rest).bit_length() if rest else 55)
    estimate = _cardinality(sum(2.0**-r for r in registers if r), registers.count(0), size)
    assert estimate == pytest.approx(distinct, rel=4 * 1.04 / 32, abs=0.5)


@settings(max_examples=40, deadline=None)
@given(prefix_trees(), st.integers(2, 6))
def test_values_of_blocks_add_up_to_what_chains_name(chains: list[list[int]], block_size: int) -> None:
    given_chains = columns(chains, block_size)
    tokens, context = block_values(given_chains, np.arange(given_chains.blocks))
    assert tokens.sum() == given_chains.prompt_tokens.sum()
    assert context.sum() == pytest.approx((given_chains.prompt_tokens.astype(float) ** 2).sum() / 2)


# ---------------------------------------------------------------- right answers of public traces


@pytest.fixture(scope="module", params=["conversation", "synthetic"])
def mooncake(request: pytest.FixtureRequest) -> tuple[str, ChainColumns]:
    path = TRACES / "mooncake" / f"{request.param}_trace.jsonl.zst"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    builder = ChainBuilder(512)
    for row in read_trace((str(path),), "mooncake"):
        builder.append(round(row.arrived_at_s * 1e6), row.chain, row.prompt_tokens)
    return request.param, builder.build()


# Mean absolute error that each default may have (conversation, synthetic); sampled ones over 4 seeds.
ERRORS = {
    "aet": (0.002, 0.01),
    "statstack": (0.03, 0.03),
    "counter_stacks": (0.01, 0.01),
    "shards": (0.012, 0.025),
    "shards_fixed": (0.015, 0.02),
    "shards_hot": (0.01, 0.015),
    "lashards": (0.015, 0.02),
    "flows": (0.02, 0.025),
}


@pytest.mark.traces
@pytest.mark.parametrize("name", ERRORS)
def test_error_on_mooncake(name: str, mooncake: tuple[str, ChainColumns]) -> None:
    trace, chains = mooncake
    exact = ESTIMATORS["weighted" if name == "flows" else "run_exact"](chains)
    seeds = range(1 if name in ("aet", "counter_stacks") else 4)
    errors = [mean_error(ESTIMATORS[name](chains, seed=seed), exact, grid(chains)) for seed in seeds]
    assert np.mean(errors) <= ERRORS[name][trace == "synthetic"]


@pytest.mark.traces
@pytest.mark.parametrize("name", sorted(SURE))
def test_sure_is_exact_on_mooncake(name: str, mooncake: tuple[str, ChainColumns]) -> None:
    _, chains = mooncake
    exact = ESTIMATORS["weighted" if name == "flows" else "run_exact"](chains)
    if name != "weighted":
        assert ESTIMATORS[name](chains, **SURE[name]).hit_ratio(grid(chains)) == pytest.approx(exact.hit_ratio(grid(chains)), abs=1e-12)
    else:  # partial tails take less room, so a cache counted in tokens holds more
        assert np.all(ESTIMATORS[name](chains).hit_ratio(grid(chains)) >= 0.999 * ESTIMATORS["run_exact"](chains).hit_ratio(grid(chains)))
