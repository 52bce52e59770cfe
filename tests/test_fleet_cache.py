from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from analytics.fleet import cache
from tests.fleet_oracle import PoolOracle

SLOTS = 12
REASONS = ("", "pressure", "resize")


class Pool:
    """The kernels, driven one instance at a time in the oracle's words."""

    def __init__(self, capacity: int, distinct: int = 200) -> None:
        self.c = cache.new_caches(2, SLOTS, distinct)
        for i in range(2):
            cache.reset(self.c, i, capacity)

    def begin(self, chain: list[int], usable: int, need: int, tenant: int, now: int) -> tuple[int, np.ndarray | None]:
        ids = np.array(chain, np.int32)
        run = cache.begin(self.c, 1, ids, 0, usable, need, 0, 1)
        if run < 0:
            return cache.lookup(self.c, 1, ids, 0, usable), None
        held = np.empty(need, np.int32)
        cache.allocate(self.c, 1, ids, 0, run, tenant, now, held)
        return run, held

    def store(self, chain: list[int], run: int, held: np.ndarray, now: int) -> None:
        cache.store(self.c, 1, np.array(chain, np.int32), 0, run, len(chain), now, held)

    def events(self) -> list[tuple[str, int, str, int, int]]:
        rows = self.c.events[: self.c.counters[cache.EVENTS]].tolist()
        return [
            ("stored" if e[cache.KIND] == cache.STORED else "evicted", e[cache.BLOCK], REASONS[e[cache.REASON]], e[cache.CAUSE_TENANT],
             e[cache.IDLE_US])
            for e in rows
        ]  # fmt: skip


operation = st.one_of(
    st.tuples(
        st.just("begin"), st.lists(st.integers(0, 1), max_size=5), st.integers(0, 1), st.integers(0, 2), st.sampled_from(["now", "later"])
    ),
    st.tuples(st.just("release"), st.integers(0, 9)),
    st.tuples(st.just("resize"), st.integers(1, SLOTS)),
    st.tuples(st.just("clear")),
)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, SLOTS), st.lists(operation, max_size=40))
def test_kernels_agree_with_the_oracle_on_hits_evictions_and_order(capacity: int, operations: list[tuple]) -> None:
    pool, oracle = Pool(capacity), PoolOracle(capacity)
    names: dict[tuple[int, ...], int] = {}
    running: list[tuple[list[int], int, np.ndarray, list[int], str]] = []
    for now, (kind, *what) in enumerate(operations):
        if kind == "begin":
            digits, tail, tenant, when = what
            chain = [names.setdefault(tuple(digits[: b + 1]), len(names)) for b in range(len(digits))]
            usable = len(chain) if tail else max(0, len(chain) - 1)
            run, held = pool.begin(chain, usable, len(chain) + tail, tenant, now)
            assert run == oracle.run(chain, usable)
            blocks = oracle.allocate(chain, run, len(chain) + tail, tenant, now)
            assert (held is None) == (blocks is None)
            if held is None or blocks is None:
                continue
            if when == "now":
                pool.store(chain, run, held, now)
                oracle.store(chain, run, blocks)
            running.append((chain, run, held, blocks, when))
        elif kind == "release" and running:
            chain, run, held, blocks, when = running.pop(what[0] % len(running))
            if when == "later":
                pool.store(chain, run, held, now)
                oracle.store(chain, run, blocks)
            cache.release(pool.c, 1, now, held)
            oracle.release(blocks, now)
        elif kind == "resize":
            cache.resize(pool.c, 1, what[0], now)
            oracle.resize(what[0], now)
        elif kind == "clear":
            cache.clear(pool.c, 1)
            oracle.clear()
        assert pool.events() == oracle.events
        assert cache.free_order(pool.c, 1) == [oracle.name.get(block, -1) for block in oracle.free]
        state = pool.c.instances[1]
        assert (state[cache.FREE], state[cache.LIVE]) == (len(oracle.free), oracle.live)
        assert state[cache.EVICTABLE] == sum(block in oracle.name for block in oracle.free)
    assert pool.c.instances[0].tolist()[:2] == [capacity, capacity], "the neighbour is untouched"


def test_leaves_are_evicted_before_the_blocks_they_depend_on() -> None:
    pool = Pool(4)
    run, held = pool.begin([0, 1, 2], 3, 3, 0, 10)
    assert run == 0 and held is not None
    pool.store([0, 1, 2], 0, held, 10)
    cache.release(pool.c, 1, 20, held)
    assert cache.free_order(pool.c, 1) == [-1, 2, 1, 0]
    pool.begin([7, 8], 2, 2, 5, 50)  # takes the empty block, then the deepest leaf
    assert pool.events()[-1] == ("evicted", 2, "pressure", 5, 30)
    assert cache.lookup(pool.c, 1, np.array([0, 1, 2], np.int32), 0, 3) == 2


def test_a_second_copy_is_no_event_and_keeps_the_hash_alive() -> None:
    pool = Pool(4)
    for now in (1, 2):  # a prompt of exactly one block: its only block is recomputed each time
        run, held = pool.begin([3], 0, 1, 0, now)
        assert run == 0 and held is not None
        pool.store([3], 0, held, now)
        cache.release(pool.c, 1, now, held)
    assert pool.events() == [("stored", 3, "", -1, -1)]
    pool.begin([], 0, 3, 1, 9)  # the two empty blocks and the older copy
    assert len(pool.events()) == 1
    pool.begin([], 0, 1, 1, 9)
    assert pool.events()[1:] == [("evicted", 3, "pressure", 1, 7)]


def test_a_cut_takes_free_blocks_now_and_pinned_ones_as_they_are_freed() -> None:
    pool = Pool(6)
    _, first = pool.begin([0, 1], 2, 2, 0, 1)
    _, second = pool.begin([5], 1, 1, 0, 1)
    assert first is not None and second is not None
    pool.store([0, 1], 0, first, 1)
    pool.store([5], 0, second, 1)
    cache.release(pool.c, 1, 2, second)
    cache.resize(pool.c, 1, 1, 3)
    assert pool.events()[-1] == ("evicted", 5, "resize", -1, 1)
    assert pool.c.instances[1, cache.LIVE] == 2
    cache.release(pool.c, 1, 8, first)
    assert pool.events()[-1] == ("evicted", 1, "resize", -1, 0)
    assert cache.free_order(pool.c, 1) == [0]
    cache.resize(pool.c, 1, 3, 9)
    assert cache.free_order(pool.c, 1) == [-1, -1, 0], "new room is used before anything is evicted"
