"""Reuse engine: bins, the run-level stack beside Olken's tree and a list that is a stack, limits, state, input outside the contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analytics.reuse import stack_kernel as kernel
from analytics.reuse.bins import MAX_BITS, N_BINS, bin_edges, bin_of, bins_of, edges_of
from analytics.reuse.chains import ChainColumns, concat, densify
from analytics.reuse.olken import olken_distances
from analytics.reuse.run_exact import Runs, RunStack
from analytics.reuse.stack_parts import find, weight_up_to

TOP_U64 = (1 << 64) - 1
Trace = list[tuple[int, list[int]]]


# ---------------------------------------------------------------- bins


@settings(deadline=None)
@given(st.integers(0, (1 << MAX_BITS) - 1))
def test_a_value_lies_inside_the_edges_of_its_bin(value: int) -> None:
    lo, hi = bin_edges(bin_of(value))
    assert lo <= value < hi
    assert hi - lo == 1 or 32 * (hi - lo) <= lo
    assert bin_of(max(value - 1, 0)) <= bin_of(value)


def test_bins_follow_one_another_without_gap_and_cover_all_values() -> None:
    lo, hi = edges_of(np.arange(N_BINS, dtype=np.int32))
    assert lo[0] == 0 and hi[-1] == 1 << MAX_BITS
    assert np.array_equal(lo[1:], hi[:-1])
    assert np.array_equal(lo[:32], np.arange(32))
    assert np.array_equal(bins_of(lo), np.arange(N_BINS)) and np.array_equal(bins_of(hi - 1), np.arange(N_BINS))
    assert bin_of(-5) == 0 and bin_of(1 << 62) == N_BINS - 1


# ---------------------------------------------------------------- oracle: the stack as a plain list


class ListStack:
    """An LRU stack as a list whose head is the most recent block."""

    def __init__(self) -> None:
        self.stack: list[int] = []
        self.cut = 0
        self._touched: dict[int, int] = {}

    def touch(self, ts_us: int, chain: list[int], limit: int | None = None) -> tuple[list[int], list[int]]:
        """Distance and age of each block at look-up, -1 where it does not stand in the stack."""
        position = {block: depth for depth, block in enumerate(self.stack)}
        distances = [position.get(block, -1) for block in chain]
        ages = [ts_us - self._touched[block] if block in position else -1 for block in chain]
        members = set(chain)
        self.stack = chain + [block for block in self.stack if block not in members]
        self._touched.update(dict.fromkeys(chain, ts_us))
        if limit is not None:
            self.cut += len(self.stack[limit:])
            self.stack = self.stack[:limit]
        return distances, ages


def list_stack(trace: Trace, limit: int | None = None) -> tuple[list[int], list[int], list[int], int]:
    """Distances and ages of a whole trace, the stack at its end, and how many blocks were cut off."""
    oracle = ListStack()
    answers = [oracle.touch(ts_us, chain, limit) for ts_us, chain in trace]
    return [d for part in answers for d in part[0]], [a for part in answers for a in part[1]], oracle.stack, oracle.cut


def columns(trace: Trace) -> ChainColumns:
    chains = [np.array(chain, np.uint64) for _, chain in trace]
    return ChainColumns.pack([ts for ts, _ in trace], chains, [len(chain) for _, chain in trace], 1)


def shifted(runs: Runs, by: int) -> Runs:
    return replace(runs, request=runs.request + np.int32(by))


def touch_in_cuts(stack: RunStack, trace: Trace, cuts: Sequence[int]) -> Runs:
    """Touch the trace in several calls and shift the requests' indices back to those of the whole trace."""
    parts, start = [], 0
    for end in [*sorted({min(cut, len(trace)) for cut in cuts}), len(trace)]:
        part = columns(trace[start:end])
        parts.append(shifted(stack.touch(part.ts_us, part.offsets, part.hashes), start))
        start = end
    return Runs.concat(parts)


def same_runs(a: Runs, b: Runs) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True))


def from_top(stack: RunStack) -> list[tuple[int, int]]:
    """Blocks with the time of their last touch, most recent first, read from the stack's state."""
    state = stack.state()
    nodes = np.split(state["hashes"], np.cumsum(state["lengths"]))[:-1]
    return [(int(block), int(ts)) for node, ts in zip(nodes[::-1], state["ts_us"][::-1], strict=True) for block in node]


@st.composite
def prefix_traces(draw: st.DrawFn, longest: int = 40, fresh: int = 12) -> Trace:
    """Requests whose hashes commit to their prefix: each one follows an earlier chain for a while, then goes its own way."""
    steps = draw(st.lists(st.tuples(st.integers(0, 8), st.integers(0, longest), st.integers(0, fresh), st.integers(0, 3)), max_size=30))
    chains: list[list[int]] = [[]]
    trace: Trace = []
    ts_us, used = 0, 0
    for back, keep, new, wait in steps:
        stem = chains[-1 - back % len(chains)][:keep]
        chain = stem + [(TOP_U64 - i) if i % 3 else i for i in range(used, used + new)]
        used += new
        ts_us += wait
        chains.append(chain)
        trace.append((ts_us, chain))
    return trace


@settings(max_examples=150, deadline=None)
@given(prefix_traces(), st.lists(st.integers(0, 30), max_size=4))
def test_run_stack_equals_olken_equals_a_list_block_by_block(trace: Trace, cuts: list[int]) -> None:
    packed = columns(trace)
    distances, ages, blocks, _ = list_stack(trace)
    ids, distinct = densify(packed.hashes)
    by_tree = olken_distances(packed.ts_us, packed.offsets, ids, distinct)
    stack = RunStack(initial_room=4)
    by_run = touch_in_cuts(stack, trace, cuts).per_block()
    assert by_tree[0].tolist() == distances and by_tree[1].tolist() == ages
    assert by_run[0].tolist() == distances and by_run[1].tolist() == ages
    assert stack.depth_blocks == len(blocks) == distinct
    assert [block for block, _ in from_top(stack)] == blocks


@settings(max_examples=150, deadline=None)
@given(prefix_traces(), st.integers(1, 60), st.lists(st.integers(0, 30), max_size=4))
def test_a_limited_stack_is_exact_above_its_depth(trace: Trace, limit: int, cuts: list[int]) -> None:
    distances, ages, blocks, cut = list_stack(trace, limit)
    stack = RunStack(limit, initial_room=4, filter_bits=14)
    runs = touch_in_cuts(stack, trace, cuts)
    by_run = runs.per_block()
    assert by_run[0].tolist() == distances and by_run[1].tolist() == ages
    assert stack.depth_blocks == len(blocks) <= limit
    assert stack.trimmed_blocks == cut
    assert np.all(runs.beyond[runs.distance >= 0] == 0) and np.all(runs.beyond <= runs.length)


@settings(max_examples=60, deadline=None)
@given(prefix_traces(), st.integers(0, 30), st.one_of(st.none(), st.integers(1, 60)))
def test_a_stack_restored_from_its_state_goes_on_the_same(trace: Trace, cut: int, limit: int | None) -> None:
    whole, first = RunStack(limit, filter_bits=14), RunStack(limit, filter_bits=14)
    expected = touch_in_cuts(whole, trace, [])
    head = touch_in_cuts(first, trace[:cut], [])
    state = first.state()
    second = RunStack.from_state(state)
    assert all(np.array_equal(value, second.state()[name]) for name, value in state.items())
    tail = touch_in_cuts(second, trace[cut:], [])
    assert same_runs(Runs.concat([head, shifted(tail, min(cut, len(trace)))]), expected)
    assert from_top(whole) == from_top(second)
    assert np.array_equal(whole.state()["filter"], second.state()["filter"])
    assert whole.trimmed_blocks == second.trimmed_blocks


@settings(max_examples=60, deadline=None)
@given(prefix_traces(), st.integers(0, 30), st.one_of(st.none(), st.integers(1, 60)))
def test_without_merging_the_runs_are_the_same_and_the_nodes_no_fewer(trace: Trace, cut: int, limit: int | None) -> None:
    merged, plain = RunStack(limit), RunStack(limit, merge=False)
    assert same_runs(touch_in_cuts(merged, trace, [cut]), touch_in_cuts(plain, trace, [cut]))
    restored = RunStack.from_state(plain.state())
    assert restored.state()["lengths"].size == plain.state()["lengths"].size >= merged.state()["lengths"].size
    again = columns(trace[:3])
    restored.touch(again.ts_us, again.offsets, again.hashes)
    plain.touch(again.ts_us, again.offsets, again.hashes)
    assert restored.state()["lengths"].tolist() == plain.state()["lengths"].tolist()


def test_a_chain_asked_for_again_stays_split_without_merging() -> None:
    nodes = {}
    for merge in (True, False):
        stack = RunStack(merge=merge)
        for ts_us, chain in enumerate(([1, 2, 3, 4], [1, 2], [1, 2, 3, 4], [1, 2, 3, 4])):
            stack.touch(*_one(ts_us, chain))
        nodes[merge] = stack.state()["lengths"].tolist()
    assert nodes == {True: [4], False: [2, 2]}


def test_a_state_of_three_scalars_and_one_filter_is_read() -> None:
    """States written before merging had a switch and the filter two generations."""
    stack, cut, bits = RunStack(7), np.arange(7, 300, dtype=np.uint64), 1 << 14
    stack.touch(*_one(0, range(7)))
    state, known = stack.state(), np.zeros(bits // 64, np.uint64)
    for block in cut.tolist():
        mixed = ((block ^ (block >> 32)) * 0x9E3779B97F4A7C15) & TOP_U64
        mixed ^= mixed >> 29
        for probe in range(3):
            bit = (mixed + probe * (mixed >> 32 | 1)) % bits
            known[bit // 64] |= np.uint64(1 << bit % 64)
    older = RunStack.from_state({**state, "scalars": np.array([7, cut.size, known.size]), "filter": known})
    assert older.maybe_trimmed(cut).all() and not older.maybe_trimmed(np.arange(10**6, 10**6 + 300, dtype=np.uint64)).all()
    older.touch(*_one(1, range(7)))
    assert from_top(older) == [(block, 1) for block in range(7)] and older.trimmed_blocks == cut.size


@settings(max_examples=100, deadline=None)
@given(prefix_traces(), st.one_of(st.none(), st.integers(1, 60)))
def test_runs_are_the_longest_stretches_with_one_age(trace: Trace, limit: int | None) -> None:
    runs = touch_in_cuts(RunStack(limit), trace, [])
    same_request = runs.request[1:] == runs.request[:-1]
    goes_on = (runs.distance[:-1] + runs.length[:-1] == runs.distance[1:]) & (runs.age_us[1:] == runs.age_us[:-1])
    assert not np.any(same_request & goes_on & (runs.distance[1:] >= 0))
    assert np.all(runs.length > 0)
    assert np.all(runs.distance[1:][same_request & (runs.distance[1:] >= 0)] > runs.distance[:-1][same_request & (runs.distance[1:] >= 0)])


# ---------------------------------------------------------------- limits, extremes, memory


def test_cut_blocks_are_told_from_cold_ones() -> None:
    stack = RunStack(10)
    stack.touch(*_one(0, range(100, 110)))
    stack.touch(*_one(1, range(200, 206)))
    assert stack.trimmed_blocks == 6
    assert stack.maybe_trimmed(np.arange(100, 110, dtype=np.uint64)).tolist() == [False] * 4 + [True] * 6
    again = stack.touch(*_one(2, [*range(100, 108), 999]))
    assert again.distance.tolist() == [6, -1] and again.length.tolist() == [4, 5] and again.beyond.tolist() == [0, 4]
    assert not RunStack(10).maybe_trimmed(np.arange(3, dtype=np.uint64)).any()


def test_hashes_at_both_ends_of_the_range_are_plain_keys() -> None:
    stack = RunStack(initial_room=4)
    for ts_us, chain in enumerate(([0, TOP_U64], [TOP_U64 - 1, 1 << 63], [0, TOP_U64])):
        runs = stack.touch(*_one(ts_us, chain))
    assert runs.distance.tolist() == [2] and runs.length.tolist() == [2] and runs.age_us.tolist() == [2]


def test_a_time_that_runs_backwards_gives_age_zero() -> None:
    stack = RunStack()
    stack.touch(*_one(50, [1, 2]))
    assert stack.touch(*_one(20, [1, 2])).age_us.tolist() == [0]


def test_memory_follows_the_depth_and_not_the_stream() -> None:
    stack, rng, sizes = RunStack(2000), np.random.default_rng(5), []
    for step in range(60):
        chains = [np.concatenate([np.arange(1, 20), rng.integers(1 << 40, 1 << 63, 80)]).astype(np.uint64) for _ in range(100)]
        packed = ChainColumns.pack([step] * 100, chains, [99] * 100, 1)
        stack.touch(packed.ts_us, packed.offsets, packed.hashes)
        sizes.append(stack.nbytes)
    assert stack.depth_blocks == 2000 and stack.trimmed_blocks > 450_000
    assert max(sizes[20:]) == max(sizes[:20])


def test_a_chain_that_grows_turn_by_turn_keeps_few_nodes() -> None:
    stack = RunStack()
    turns, other = 200, [*range(5_000_000, 5_000_010)]
    for turn in range(1, turns + 1):
        stack.touch(*_one(2 * turn, range(1000, 1000 + 50 * turn)))
        stack.touch(*_one(2 * turn + 1, [*other, 10**9 + turn]))
    runs = stack.touch(*_one(10**6, range(1000, 1000 + 50 * turns)))
    assert runs.distance.tolist() == [11] and runs.length.tolist() == [50 * turns]
    chain_nodes = int(stack._stack.at[kernel.LIVE]) - turns
    assert chain_nodes < 12


@pytest.mark.parametrize(
    ("offsets", "reason"), [([0, 3], "one more"), ([0, 2, 1], "must rise"), ([0, 1, 9], "must rise"), ([-1, 1, 2], "must rise")]
)
def test_offsets_that_do_not_fit_are_refused(offsets: list[int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        RunStack().touch(np.zeros(2, np.int64), np.array(offsets), np.arange(3, dtype=np.uint64))


def test_a_depth_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        RunStack(0)


@settings(max_examples=60, deadline=None)
@given(prefix_traces(), st.lists(st.one_of(st.none(), st.integers(1, 60)), min_size=31, max_size=31))
def test_a_depth_that_changes_takes_hold_after_the_next_request(trace: Trace, limits: list[int | None]) -> None:
    stack, oracle = RunStack(initial_room=4, filter_bits=14), ListStack()
    for (ts_us, chain), limit in zip(trace, limits, strict=False):
        stack.max_depth_blocks = limit
        distances, ages = stack.touch(*_one(ts_us, chain)).per_block()
        assert (distances.tolist(), ages.tolist()) == oracle.touch(ts_us, chain, limit)
        assert stack.max_depth_blocks == limit
        assert [block for block, _ in from_top(stack)] == oracle.stack
    assert stack.trimmed_blocks == oracle.cut


def test_empty_calls_and_empty_chains() -> None:
    stack = RunStack()
    assert len(stack.touch(np.empty(0, np.int64), np.zeros(1, np.int64), np.empty(0, np.uint64))) == 0
    assert len(stack.touch(np.zeros(3, np.int64), np.zeros(4, np.int64), np.empty(0, np.uint64))) == 0
    assert RunStack.from_state(stack.state()).depth_blocks == 0


# ---------------------------------------------------------------- input outside the contract


def check_sound(stack: RunStack) -> None:
    """Every node stands in one slot, is found by its first hash, and the tree counts what the nodes hold."""
    inner = stack._stack
    at, live = inner.at, [int(node) for node in inner.slots[1 : inner.at[kernel.TOP] + 1] if node >= 0]
    assert len(live) == len(set(live)) == at[kernel.LIVE]
    assert int(inner.nodes[live, kernel.LENGTH].sum()) == stack.depth_blocks
    assert weight_up_to(inner.fenwick, int(at[kernel.TOP])) == stack.depth_blocks
    for node in live:
        place = find(inner.table, inner.arena[inner.nodes[node, kernel.START]])
        assert place >= 0 and int(inner.table[2 * place + 1]) == node + 1
    assert np.count_nonzero(inner.table[1::2]) == len(live)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), max_size=9), max_size=25), st.one_of(st.none(), st.integers(1, 8)), st.integers(0, 25))
def test_repeated_and_unchained_hashes_harm_nothing(chains: list[list[int]], limit: int | None, cut: int) -> None:
    trace = list(enumerate(chains))
    whole, parted = RunStack(limit, initial_room=4), RunStack(limit, initial_room=64)
    expected = touch_in_cuts(whole, trace, [])
    assert int(expected.length.sum()) == sum(map(len, chains))
    head = touch_in_cuts(parted, trace[:cut], [])
    tail = touch_in_cuts(RunStack.from_state(parted.state()), trace[cut:], [])
    assert same_runs(Runs.concat([head, shifted(tail, min(cut, len(trace)))]), expected)
    check_sound(whole)
    assert limit is None or whole.depth_blocks <= limit


def test_a_block_repeated_in_its_chain_has_a_defined_result() -> None:
    stack = RunStack()
    stack.touch(*_one(0, [7]))
    runs = stack.touch(*_one(1, [7, 8, 7]))
    assert runs.distance.tolist() == [0, -1] and runs.length.tolist() == [1, 2]
    stack.touch(*_one(2, [9]))
    back = stack.touch(*_one(3, [9, 9]))
    assert back.distance.tolist() == [0, -1] and stack.depth_blocks == 4
    check_sound(stack)


def _one(ts_us: int, chain: Sequence[int] | range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    hashes = np.array(list(chain), np.uint64)
    return np.array([ts_us]), np.array([0, hashes.size]), hashes


# ---------------------------------------------------------------- columns


def test_columns_join_and_split_again() -> None:
    trace: Trace = [(0, [1, 2]), (1, []), (5, [1, 3, 4])]
    whole = columns(trace)
    joined = concat([whole.slice(0, 1), columns(trace[1:])])
    assert np.array_equal(joined.offsets, whole.offsets) and np.array_equal(joined.hashes, whole.hashes)
    assert whole.slice(0, 2).blocks == 2 and whole.slice(1, 99).hashes.tolist() == [1, 3, 4]
    with pytest.raises(ValueError, match="block_size"):
        concat([])


@settings(deadline=None)
@given(st.lists(st.integers(0, TOP_U64), max_size=50))
def test_dense_ids_number_keys_by_first_appearance(keys: list[int]) -> None:
    ids, distinct = densify(np.array(keys + keys, np.uint64))
    order = {key: rank for rank, key in enumerate(dict.fromkeys(keys))}
    assert ids.tolist() == [order[key] for key in keys + keys] and distinct == len(order)


def test_dense_ids_of_many_keys() -> None:
    keys = np.arange(50_000, dtype=np.uint64) * np.uint64(1 << 40)
    ids, distinct = densify(keys)
    assert distinct == keys.size and np.array_equal(ids, np.arange(keys.size))


# ---------------------------------------------------------------- closed forms


def test_a_cyclic_scan_has_one_distance() -> None:
    blocks, laps = 37, 6
    trace = [(lap * blocks + block, [1000 + block]) for lap in range(laps) for block in range(blocks)]
    runs = touch_in_cuts(RunStack(), trace, [])
    assert np.all(runs.distance[blocks:] == blocks - 1) and np.all(runs.distance[:blocks] == -1)
    assert np.all(runs.age_us[blocks:] == blocks)


def test_uniform_independent_references_spread_evenly_over_distances() -> None:
    blocks, count = 64, 200_000
    keys = np.random.default_rng(3).integers(0, blocks, count)
    packed = ChainColumns.pack(range(count), np.split(keys.astype(np.uint64), count), [1] * count, 1)
    runs = RunStack().touch(packed.ts_us, packed.offsets, packed.hashes)
    share = np.bincount(runs.distance[count // 10 :], minlength=blocks) / (count - count // 10)
    assert np.abs(np.cumsum(share) - np.arange(1, blocks + 1) / blocks).max() < 0.005
