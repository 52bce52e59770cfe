"""Both forms of every policy: what holds for all of them, over random prefix trees."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analytics.policies import POLICIES, leading_hits
from analytics.policies.cursor import Trace, bare, parents
from analytics.reuse.chains import densify
from analytics.reuse.run_exact import RunStack

TWO_FORMS = sorted(name for name, policy in POLICIES.items() if policy.walk is not None)


def prefix_hashes(chain: list[int]) -> list[int]:
    out, before = [], 0
    for token in chain:
        before = hash((before, token)) & 0xFFFFFFFF
        out.append(before)
    return out


def trace_from(chains: list[list[int]], tenants: list[int] | None = None) -> tuple[Trace, np.ndarray]:
    """A trace of token chains a second apart, ids dense; and its hashes."""
    hashes = np.array([h for chain in chains for h in prefix_hashes(chain)], np.uint64)
    offsets = np.cumsum([0, *map(len, chains)]).astype(np.int64)
    ids, distinct = densify(hashes)
    n = len(chains)
    depth = np.zeros(distinct, np.int32)
    depth[ids] = np.arange(ids.size) - np.repeat(offsets[:-1], np.diff(offsets))
    codes = (np.arange(n) % 3).astype(np.int32)
    lengths = np.diff(offsets)
    return Trace(
        ids.astype(np.int32), offsets, np.arange(n, dtype=np.int64) * 1_000_000, lengths * 16, codes * 0,
        (np.arange(n) % 5).astype(np.int32), codes, (1 + np.arange(n) % 4).astype(np.int32), parents(ids, offsets, distinct), depth, 16,
    ), hashes  # fmt: skip


chains = st.lists(st.lists(st.integers(0, 2), min_size=0, max_size=8), min_size=1, max_size=60)


@pytest.mark.parametrize("name", TWO_FORMS)
@settings(max_examples=40, deadline=None)
@given(chains=chains, capacity=st.integers(1, 40))
def test_prefix_form_hits_a_leading_run_and_is_deterministic(name: str, chains: list[list[int]], capacity: int) -> None:
    trace, _ = trace_from(chains)
    hits = POLICIES[name].replay(trace, capacity)
    assert np.array_equal(hits, leading_hits(hits, trace.offsets))
    assert np.array_equal(hits, POLICIES[name].replay(trace, capacity))
    first = np.unique(trace.ids, return_index=True)[1]
    assert not hits[first].any()


@pytest.mark.parametrize("name", TWO_FORMS)
@settings(max_examples=40, deadline=None)
@given(chains=chains, capacity=st.integers(1, 40))
def test_no_policy_beats_belady(name: str, chains: list[list[int]], capacity: int) -> None:
    trace, _ = trace_from(chains)
    best = POLICIES["belady"].replay(trace, capacity).sum()
    assert POLICIES[name].replay(trace, capacity, "prefix").sum() <= best
    assert POLICIES[name].replay(trace, capacity, "plain").sum() <= best


@pytest.mark.parametrize("name", sorted(name for name in TWO_FORMS if POLICIES[name].fill))
@settings(max_examples=40, deadline=None)
@given(keys=st.lists(st.integers(0, 30), max_size=200), capacity=st.integers(0, 35))
def test_the_fast_plain_form_equals_the_walk(name: str, keys: list[int], capacity: int) -> None:
    ids, policy = np.array(keys, np.int32), POLICIES[name]
    assert np.array_equal(policy(ids, 31, capacity), policy.replay(bare(ids, 31), capacity, "plain"))


@pytest.mark.parametrize("name", TWO_FORMS)
def test_everything_fits(name: str) -> None:
    """With room for all, every form of every policy hits all but first touches."""
    rng = np.random.default_rng(3)
    trace, _ = trace_from([rng.integers(0, 2, rng.integers(1, 8)).tolist() for _ in range(60)])
    first = np.zeros(trace.ids.size, np.bool_)
    first[np.unique(trace.ids, return_index=True)[1]] = True
    for form in ("plain", "prefix"):
        assert np.array_equal(POLICIES[name].replay(trace, trace.parent.size, form), ~first)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None)
@given(chains=chains, capacity=st.integers(1, 40))
def test_prefix_safe_lru_is_the_stack_that_curves_are_made_of(chains: list[list[int]], capacity: int) -> None:
    trace, hashes = trace_from(chains)
    distance, _ = RunStack().touch(trace.ts_us, trace.offsets, hashes).per_block()
    assert np.array_equal(POLICIES["lru"].replay(trace, capacity), (distance >= 0) & (distance < capacity))


def test_what_makes_no_sense_is_refused() -> None:
    trace, _ = trace_from([[1, 2], [1, 3]])
    with pytest.raises(ValueError, match="form"):
        POLICIES["lru"].replay(trace, 3, "radix")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="negative"):
        POLICIES["lru"].replay(trace, -1)
    with pytest.raises(ValueError, match="commit"):
        POLICIES["lru"].replay(trace._replace(ids=trace.ids[::-1].copy()), 3)
    assert not POLICIES["lru"].replay(trace, 0).any()
