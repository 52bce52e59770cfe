"""minisim and kosmo, the estimators of any policy's curve, beside full simulation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analytics.estimators.kosmo import KOSMO_POLICIES, kosmo, least_sizes
from analytics.estimators.minisim import miniature_hits, minisim
from analytics.estimators.sampling import spread_blocks
from analytics.policies import POLICIES
from analytics.reuse.chains import ChainBuilder, ChainColumns, densify
from ingest.sources import read_trace

TRACES = Path(__file__).parents[1] / ".." / "shared" / "traces"


# Those with published figures; minisim takes any policy of the registry.
every_simulated = pytest.mark.parametrize("policy", ["2q", "arc", "belady", "fifo", "lfu", "lru", "s3fifo", "sieve"])


def references(keys: np.ndarray) -> ChainColumns:
    """Every key a request of its own, one token long."""
    n = keys.size
    return ChainColumns(np.arange(n), np.arange(n + 1), keys.astype(np.uint64), np.ones(n, np.int64), 1)


def zipf(distinct: int, count: int, exponent: float, seed: int) -> ChainColumns:
    cumulated = np.cumsum(1 / np.arange(1, distinct + 1) ** exponent)
    return references(np.searchsorted(cumulated / cumulated[-1], np.random.default_rng(seed).random(count)))


def grid(smallest: int, largest: int) -> np.ndarray:
    return np.unique(np.geomspace(smallest, largest, 40).round().astype(np.int64))


def full(chains: ChainColumns, policy: str, capacities: np.ndarray) -> np.ndarray:
    ids, distinct = densify(chains.hashes)
    return np.array([POLICIES[policy](ids, distinct, int(c)).mean() for c in capacities])


def mean_error(chains: ChainColumns, policy: str, seed: int, **given_: bool) -> float:
    sizes = grid(1000, np.unique(chains.hashes).size)
    estimated = minisim(chains, policy=policy, rate=0.1, seed=seed, **given_).hit_ratio(sizes)
    return float(np.abs(estimated - full(chains, policy, sizes)).mean())


# ---------------------------------------------------------------- minisim


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_minisim_at_rate_one_is_full_simulation(policy: str) -> None:
    chains, sizes = zipf(500, 5000, 0.8, 1), np.array([1, 7, 60, 200, 450])
    estimated = minisim(chains, policy=policy, rate=1.0, capacities=sizes)
    assert estimated.hit_ratio(sizes) == pytest.approx(np.maximum.accumulate(full(chains, policy, sizes)), abs=1e-12)


@every_simulated
def test_minisim_at_ten_percent_of_a_zipf_stream(policy: str) -> None:
    """Zipf 0.8 over 30,000 blocks, 40 log-spaced capacities from 1,000 blocks to all, mean over 4 draws."""
    chains = zipf(30_000, 200_000, 0.8, 2)
    assert np.mean([mean_error(chains, policy, seed) for seed in range(4)]) <= 0.005


def test_control_variate_and_even_spread_each_remove_most_of_the_sampling_error() -> None:
    chains = zipf(20_000, 200_000, 1.0, 3)

    def error(**given_: bool) -> float:
        return float(np.mean([mean_error(chains, "s3fifo", seed, **given_) for seed in range(4)]))

    published = error(control=False, spread=False)
    assert error(control=True, spread=False) < published / 3 and error(control=False, spread=True) < published / 3


def test_minisim_weighs_tokens_and_cost_by_position() -> None:
    """A chain of ten blocks asked for ten times, and 300 others once: all of the chain's later hits, tails and positions included."""
    builder = ChainBuilder(16)
    for i in range(310):
        hot = i % 31 == 0
        blocks = np.arange(10, dtype=np.uint64) + np.uint64(0 if hot else 100 * i + 1000)
        builder.append(i, blocks, 155 if hot else 160)
    curve = minisim(builder.build(), rate=1.0, capacities=[400])
    assert curve.hit_ratio([400], "tokens")[0] == pytest.approx(9 * 155 / (10 * 155 + 300 * 160))
    expected = 9 * (155 + 0.5 * 155**2) / (10 * (155 + 0.5 * 155**2) + 300 * (160 + 0.5 * 160**2))
    assert curve.hit_ratio([400], "cost", (1.0, 1.0))[0] == pytest.approx(expected)


def test_a_policy_may_serve_less_from_more_blocks_but_its_curve_never_falls() -> None:
    """Belady's anomaly, each page a stretch of 500 blocks: FIFO of three pages serves 3 of 12, of four pages 2."""
    pages = [1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5]
    keys = np.concatenate([np.arange(500) + 1000 * page for page in pages])
    given_: dict[str, Any] = {"policy": "fifo", "rate": 0.1, "capacities": [1500, 2000, 2500], "seed": 4}
    _, hits = miniature_hits(references(keys), control=False, **given_)
    assert hits[0] / keys.size == pytest.approx([3 / 12, 2 / 12, 7 / 12], abs=1e-9)
    curve = minisim(references(keys), control=False, **given_)
    assert curve.hit_ratio([1500, 2000, 2500]).tolist() == pytest.approx([3 / 12, 3 / 12, 7 / 12], abs=1e-9)


def test_minisim_refuses_what_makes_no_sense() -> None:
    chains = zipf(5000, 20_000, 0.8, 1)
    with pytest.raises(ValueError, match="policy"):
        minisim(chains, policy="clairvoyant")
    with pytest.raises(ValueError, match="below 1000"):
        minisim(chains, rate=0.1, capacities=[999, 2000])
    for rate in (0.0, 1.5):
        with pytest.raises(ValueError, match="rate"):
            minisim(chains, rate=rate)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=300), st.sampled_from([0.05, 0.1, 0.3, 0.5, 0.7, 1.0]), st.integers(0, 99))
def test_a_spread_sample_takes_its_share_of_every_stretch_of_blocks(keys: list[int], rate: float, seed: int) -> None:
    """Whole blocks, and of any k strata in a row k * ceil(1/rate) * rate of them, to less than one a stratum."""
    ids, distinct = densify(np.array(keys, np.uint64))
    times = np.bincount(ids)
    kept = np.unique(ids[spread_blocks(ids, distinct, rate, seed)])
    assert np.array_equal(spread_blocks(ids, distinct, rate, seed), np.flatnonzero(np.isin(ids, kept)))
    order, stratum = sorted(range(distinct), key=lambda block: (-times[block], block)), int(np.ceil(1 / rate))
    for start in range(0, distinct - stratum + 1, stratum):
        drawn = len(set(order[start : start + stratum]) & set(kept.tolist()))
        assert abs(drawn - stratum * rate) < 1


def test_every_block_is_as_likely_in_a_spread_sample() -> None:
    ids = np.random.default_rng(3).integers(0, 40, 400).astype(np.int32)
    ids, distinct = densify(ids.astype(np.uint64))
    for rate in (0.1, 0.3):
        draws = [np.unique(ids[spread_blocks(ids, distinct, rate, seed)]) for seed in range(4000)]
        share = np.bincount(np.concatenate(draws), minlength=distinct) / 4000
        assert share == pytest.approx(rate, abs=4.5 * np.sqrt(rate * (1 - rate) / 4000))


def mooncake(trace: str) -> ChainColumns:
    path = TRACES / "mooncake" / f"{trace}_trace.jsonl.zst"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    builder = ChainBuilder(512)
    for request in read_trace([str(path)], "mooncake"):
        builder.append(round(request.arrived_at_s * 1e6), request.chain, request.prompt_tokens, request.block_tokens)
    return builder.build()


@pytest.mark.traces
@every_simulated
@pytest.mark.parametrize("trace", ["conversation", "synthetic"])
def test_minisim_at_ten_percent_of_mooncake(trace: str, policy: str) -> None:
    """40 log-spaced capacities from 1,000 blocks to all distinct ones, 512-token blocks, mean over 3 draws."""
    chains = mooncake(trace)
    assert np.mean([mean_error(chains, policy, seed) for seed in range(3)]) <= 0.005


@pytest.mark.traces
@every_simulated
def test_minisim_at_ten_percent_of_ragpulse(policy: str) -> None:
    """A trace that nothing was chosen by; capacities as above, in components."""
    path = TRACES / "ragpulse" / "0_trace.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is absent")
    chains = references(np.concatenate([request.chain for request in read_trace([str(path)], "ragpulse")]))
    assert np.mean([mean_error(chains, policy, seed) for seed in range(3)]) <= 0.005


# ---------------------------------------------------------------- kosmo


@pytest.mark.parametrize("policy", range(3))
def test_kosmo_on_what_every_policy_does_alike(policy: int) -> None:
    """First touches hit nowhere, repeats everywhere, and a loop only where all of it fits."""
    assert least_sizes(np.array([0, 0, 1, 1, 1, 0], np.int32), 2, policy).tolist()[:5] == [0, 1, 0, 1, 1]
    loop = least_sizes(np.tile(np.arange(8, dtype=np.int32), 6), 8, policy)
    assert not loop[:8].any() and loop.max() <= 8
    if policy == 0:
        assert (loop[8:] == 8).all()


@pytest.mark.parametrize(("policy", "tolerance"), [("lfu", 0.004), ("fifo", 0.10), ("2q", 0.03)])
def test_kosmo_near_full_simulation(policy: str, tolerance: float) -> None:
    """Zipf 1.0 over 600 blocks without sampling, 40 log-spaced capacities; FIFO and 2Q break the inclusion that Kosmo assumes."""
    chains = zipf(600, 8000, 1.0, 4)
    sizes = grid(5, np.unique(chains.hashes).size)
    curve = kosmo(chains, policy=policy)
    assert np.abs(curve.hit_ratio(sizes) - full(chains, policy, sizes)).mean() <= tolerance
    assert curve.ideal_ratio() == pytest.approx(1 - np.unique(chains.hashes).size / chains.blocks)


def test_kosmo_on_a_sample() -> None:
    """LFU on Zipf 0.8 over 4,000 blocks from about 500 of them, mean over 3 draws and 40 capacities."""
    chains = zipf(4000, 40_000, 0.8, 5)
    sizes = grid(100, np.unique(chains.hashes).size)
    truth = full(chains, "lfu", sizes)
    errors = [np.abs(kosmo(chains, policy="lfu", s_max=500, seed=seed).hit_ratio(sizes) - truth).mean() for seed in range(3)]
    assert np.mean(errors) <= 0.02


def test_kosmo_refuses_other_policies() -> None:
    assert set(KOSMO_POLICIES) <= set(POLICIES)
    with pytest.raises(ValueError, match="policy"):
        kosmo(zipf(10, 20, 1.0, 0), policy="lru")
    with pytest.raises(ValueError, match="s_max"):
        kosmo(zipf(10, 20, 1.0, 0), s_max=0)
