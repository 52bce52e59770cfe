"""Eviction policies beside slow readable twins, and contracts that hold for all of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analytics.policies import POLICIES, leading_hits

# ---------------------------------------------------------------- twins: each says which accesses hit, in plain Python


def fifo_twin(trace: list[int], capacity: int) -> list[bool]:
    queue: list[int] = []
    hits = []
    for key in trace:
        hits.append(key in queue)
        if not hits[-1]:
            queue = [*queue, key][-capacity:]
    return hits


def lru_twin(trace: list[int], capacity: int) -> list[bool]:
    stack: list[int] = []
    hits = []
    for key in trace:
        hits.append(key in stack)
        stack = [*(k for k in stack if k != key), key][-capacity:]
    return hits


def lfu_twin(trace: list[int], capacity: int) -> list[bool]:
    cache: dict[int, tuple[int, int]] = {}  # count, and when it was reached
    hits = []
    for now, key in enumerate(trace):
        hits.append(key in cache)
        if key not in cache and len(cache) == capacity:
            del cache[min(cache, key=lambda k: cache[k])]
        cache[key] = (cache.get(key, (0, 0))[0] + 1, now)
    return hits


def two_q_twin(trace: list[int], capacity: int) -> list[bool]:
    first, ghosts, hot = OrderedDict[int, None](), OrderedDict[int, None](), OrderedDict[int, None]()
    first_room, ghost_room = max(1, capacity // 4), capacity // 2
    hits = []
    for key in trace:
        hits.append(key in first or key in hot)
        if key in hot:
            hot.move_to_end(key)
        elif key not in first:
            known = key in ghosts
            ghosts.pop(key, None)
            if len(first) + len(hot) == capacity:
                if len(first) > first_room or not hot:
                    ghosts[first.popitem(last=False)[0]] = None
                    while len(ghosts) > ghost_room:
                        ghosts.popitem(last=False)
                else:
                    hot.popitem(last=False)
            (hot if known else first)[key] = None
    return hits


def arc_twin(trace: list[int], capacity: int) -> list[bool]:
    t1, t2, b1, b2 = (OrderedDict[int, None]() for _ in range(4))
    target, hits = 0.0, []

    def replace(key: int) -> None:
        if t1 and (len(t1) > target or (key in b2 and len(t1) == target)):
            b1[t1.popitem(last=False)[0]] = None
        else:
            b2[t2.popitem(last=False)[0]] = None

    for key in trace:
        hits.append(key in t1 or key in t2)
        if hits[-1]:
            (t1 if key in t1 else t2).pop(key)
            t2[key] = None
        elif key in b1 or key in b2:
            delta = len(b2) / len(b1) if key in b1 else len(b1) / len(b2)
            target = min(capacity, target + max(1, delta)) if key in b1 else max(0, target - max(1, delta))
            replace(key)
            (b1 if key in b1 else b2).pop(key)
            t2[key] = None
        else:
            if len(t1) + len(b1) == capacity:
                if len(t1) < capacity:
                    b1.popitem(last=False)
                    replace(key)
                else:
                    t1.popitem(last=False)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= capacity:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * capacity:
                    b2.popitem(last=False)
                replace(key)
            t1[key] = None
    return hits


def sieve_twin(trace: list[int], capacity: int) -> list[bool]:
    queue: list[int] = []  # oldest first
    visited: set[int] = set()
    hand, hits = 0, []
    for key in trace:
        hits.append(key in queue)
        if hits[-1]:
            visited.add(key)
            continue
        if len(queue) == capacity:
            while queue[hand] in visited:
                visited.remove(queue[hand])
                hand = (hand + 1) % len(queue)
            del queue[hand]
            hand = hand if hand < len(queue) else 0
        queue.append(key)
    return hits


def s3fifo_twin(trace: list[int], capacity: int) -> list[bool]:
    small, main, ghosts = OrderedDict[int, int](), OrderedDict[int, int](), OrderedDict[int, None]()
    small_room, ghost_room, evicted, hits = max(1, int(0.1 * capacity)), int(0.9 * capacity), False, []
    for key in trace:
        hits.append(key in small or key in main)
        if hits[-1]:
            queue = small if key in small else main
            queue[key] = min(queue[key] + 1, 3)
            continue
        known = key in ghosts
        ghosts.pop(key, None)
        while len(small) + len(main) == capacity:
            evicted = True
            if len(main) > capacity - small_room or not small:
                while main[victim := next(iter(main))] > 0:
                    main[victim] -= 1
                    main.move_to_end(victim)
                del main[victim]
                continue
            while small:
                victim, frequency = small.popitem(last=False)
                if frequency < 2:
                    ghosts[victim] = None
                    break
                main[victim] = 0
            while len(ghosts) > ghost_room:
                ghosts.popitem(last=False)
        (main if known or (not evicted and len(small) >= small_room) else small)[key] = 0
    return hits


def belady_twin(trace: list[int], capacity: int) -> list[bool]:
    cache: set[int] = set()
    hits = []
    for i, key in enumerate(trace):
        hits.append(key in cache)
        later = trace[i + 1 :]
        cache.add(key)
        cache = {k for k in cache if k in later}
        if len(cache) > capacity:
            cache.remove(max(cache, key=later.index))
    return hits


TWINS: dict[str, Callable[[list[int], int], list[bool]]] = {
    "fifo": fifo_twin, "lru": lru_twin, "lfu": lfu_twin, "2q": two_q_twin, "arc": arc_twin, "sieve": sieve_twin,
    "s3fifo": s3fifo_twin, "belady": belady_twin,
}  # fmt: skip

keys = st.integers(0, 24)
traces = st.one_of(st.lists(keys, max_size=400), st.lists(st.integers(0, 5), max_size=80))


def ids_of(trace: list[int]) -> np.ndarray:
    return np.array(trace, np.int32)


every_policy = pytest.mark.parametrize("name", sorted(POLICIES))


every_twin = pytest.mark.parametrize("name", sorted(TWINS))


def test_every_fast_simulator_has_a_twin() -> None:
    assert {name for name, policy in POLICIES.items() if policy.fill} <= set(TWINS)


@every_twin
@settings(deadline=None, max_examples=150)
@given(trace=traces, capacity=st.integers(1, 27))
def test_simulator_equals_its_twin(name: str, trace: list[int], capacity: int) -> None:
    # ids are clamped to n_ids blocks, so a cache larger than the trace's key space is asked for as well
    assert POLICIES[name](ids_of(trace), 25, capacity).tolist() == TWINS[name](trace, capacity)


@every_twin
@pytest.mark.parametrize("capacity", [1, 2, 7, 40, 200])
def test_simulator_equals_its_twin_over_a_long_trace(name: str, capacity: int) -> None:
    """Long enough for every buffer to be compacted many times."""
    rng = np.random.default_rng(capacity)
    ids = np.minimum(rng.zipf(1.3, 6000), 300).astype(np.int32)
    ids[::3] = rng.integers(0, 301, 2000)
    assert POLICIES[name](ids, 301, capacity).tolist() == TWINS[name](ids.tolist(), capacity)


# ---------------------------------------------------------------- contracts, which every policy of the registry keeps


def most_resident(ids: np.ndarray, hits: np.ndarray) -> int:
    """Blocks that must stand in the cache at the same time for these hits to be possible: those between their last access and a hit."""
    change = np.zeros(ids.size + 1, np.int64)
    last: dict[int, int] = {}
    for i, key in enumerate(ids.tolist()):
        if hits[i]:
            change[last[key]] += 1
            change[i] -= 1
        last[key] = i
    return int(np.cumsum(change).max(initial=0))


@every_policy
@settings(deadline=None, max_examples=60)
@given(trace=traces, capacity=st.integers(0, 27))
def test_capacity_is_never_exceeded_and_a_first_touch_never_hits(name: str, trace: list[int], capacity: int) -> None:
    ids = ids_of(trace)
    hits = POLICIES[name](ids, 25, capacity)
    assert hits.dtype == np.bool_ and hits.shape == ids.shape
    assert most_resident(ids, hits) <= capacity
    assert not hits[np.unique(ids, return_index=True)[1]].any()


@every_policy
@settings(deadline=None, max_examples=60)
@given(trace=traces, capacity=st.integers(1, 27))
def test_belady_is_never_beaten_and_the_same_input_gives_the_same_hits(name: str, trace: list[int], capacity: int) -> None:
    ids = ids_of(trace)
    hits = POLICIES[name](ids, 25, capacity)
    assert hits.sum() <= POLICIES["belady"](ids, 25, capacity).sum()
    assert np.array_equal(hits, POLICIES[name](ids.copy(), 25, capacity))


def best_possible(trace: list[int], capacity: int) -> int:
    """Most hits over all choices of what to keep after each access."""
    reach = {frozenset[int](): 0}
    for key in trace:
        after: dict[frozenset[int], int] = {}
        for cache, hits in reach.items():
            kept = cache | {key}
            options = [kept] if len(kept) <= capacity else [kept - {victim} for victim in kept]
            for option in options:
                after[option] = max(after.get(option, 0), hits + (key in cache))
        reach = after
    return max(reach.values())


def test_belady_is_the_best_of_all_choices() -> None:
    rng = np.random.default_rng(7)
    for capacity, length in product((1, 2, 3), (6, 9, 12)):
        for _ in range(20):
            trace = rng.integers(0, 5, length).tolist()
            assert POLICIES["belady"](ids_of(trace), 5, capacity).sum() == best_possible(trace, capacity)


@every_policy
def test_zero_capacity_never_hits_and_a_cache_that_holds_all_misses_first_touches_only(name: str) -> None:
    ids = np.random.default_rng(0).integers(0, 50, 2000).astype(np.int32)
    assert not POLICIES[name](ids, 50, 0).any()
    for capacity in (50, 51, 10**9):
        assert POLICIES[name](ids, 50, capacity).sum() == ids.size - 50
    assert POLICIES[name](np.empty(0, np.int32), 0, 5).size == 0


@every_policy
def test_one_block_of_capacity(name: str) -> None:
    """Whatever the policy: nothing but an immediate repeat can hit, unless a policy may refuse what it is asked to store."""
    hits = POLICIES[name](ids_of([1, 1, 2, 1, 2, 2, 2]), 3, 1)
    expected = [False, True, False, True, False, True, True] if name == "belady" else [False, True, False, False, False, True, True]
    assert hits.tolist() == expected


@every_policy
def test_refuses_what_makes_no_sense(name: str) -> None:
    with pytest.raises(ValueError, match="negative"):
        POLICIES[name](ids_of([0]), 1, -1)
    for bad in ([0, 3], [-1, 0]):
        with pytest.raises(ValueError, match="outside"):
            POLICIES[name](ids_of(bad), 3, 2)


def test_a_loop_longer_than_the_cache_defeats_fifo_and_lru_only_belady_keeps_its_share() -> None:
    blocks, laps, capacity = 20, 50, 10
    ids = np.tile(np.arange(blocks, dtype=np.int32), laps)
    for policy in ("fifo", "lru", "sieve", "s3fifo", "2q"):
        assert POLICIES[policy](ids, blocks, capacity).sum() <= (0 if policy in ("fifo", "lru", "sieve") else ids.size // 2)
    assert POLICIES["belady"](ids, blocks, capacity).sum() >= (laps - 1) * capacity


def test_leading_hits_stop_at_the_first_miss_of_each_chain() -> None:
    hits = np.array([1, 1, 0, 1, 0, 1, 1], np.bool_)
    assert leading_hits(hits, np.array([0, 4, 4, 5, 7])).tolist() == [True, True, False, False, False, True, True]
