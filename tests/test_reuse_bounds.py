"""What a run-level stack does unseen (compact, restore, merge, forget) and what it never does: grow with the stream."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analytics.reuse import stack_kernel as kernel
from analytics.reuse.chains import ChainColumns, densify
from analytics.reuse.olken import OlkenTree, olken_distances
from analytics.reuse.run_exact import Runs, RunStack
from tests.test_reuse import Trace, check_sound, columns, prefix_traces, shifted
from tests.test_reuse_traces import check_runs

# ---------------------------------------------------------------- compaction and merging at any point


def renumber(stack: RunStack) -> RunStack:
    stack._renumber(stack._stack.slots.size)
    return stack


def repack(stack: RunStack) -> RunStack:
    stack._repack(stack._stack.arena.size)
    return stack


def rehash(stack: RunStack) -> RunStack:
    table = np.zeros_like(stack._stack.table)
    kernel.rehash(stack._stack, table)
    stack._stack = stack._stack._replace(table=table)
    return stack


def restore(stack: RunStack) -> RunStack:
    return RunStack.from_state(stack.state())


COMPACTIONS: dict[str, Callable[[RunStack], RunStack]] = {
    "renumber": renumber,
    "repack": repack,
    "rehash": rehash,
    "restore": restore,
}


def touch_compacting(stack: RunStack, trace: Trace, points: list[tuple[int, str]]) -> Runs:
    """Touch a trace in calls that end where something is compacted; `request` counts on."""
    found, start = [], 0
    for end, name in [*sorted((min(at, len(trace)), name) for at, name in points), (len(trace), "repack")]:
        part = columns(trace[start:end])
        found.append(shifted(stack.touch(part.ts_us, part.offsets, part.hashes), start))
        stack, start = COMPACTIONS[name](stack), end
    check_sound(stack)
    return Runs.concat(found)


@settings(max_examples=300, deadline=None)
@given(
    prefix_traces(longest=400, fresh=200),
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from(sorted(COMPACTIONS))), max_size=12),
    st.one_of(st.none(), st.integers(1, 1500)),
    st.booleans(),
    st.sampled_from([4, 64, 4096]),
)
def test_no_compaction_limit_or_merging_shows_beside_olken(
    trace: Trace, points: list[tuple[int, str]], limit: int | None, merge: bool, room: int
) -> None:
    """Chains of hundreds of blocks: longer than what is compared at once and than what is merged freely."""
    packed = columns(trace)
    ids, distinct = densify(packed.hashes)
    distances, ages = olken_distances(packed.ts_us, packed.offsets, ids, distinct)
    stack = RunStack(limit, initial_room=room, filter_bits=16, merge=merge)
    check_runs(touch_compacting(stack, trace, points), distances, ages, limit)


def test_only_what_was_last_touched_together_is_joined() -> None:
    """Branches that take turns are left apart, or each turn would copy them; what comes back together as it stood is one node."""
    stem, left, right, stack = [1, 2], [3, 4, 5], [6, 7, 8, 9], RunStack()

    def lengths(ts_us: int, chain: list[int]) -> list[int]:
        feed(stack, columns([(ts_us, chain)]))
        return [int(length) for length in stack.state()["lengths"]]

    lengths(0, stem + left)
    assert lengths(1, stem + right) == [3, 4, 2]  # a cold rest joins a node that ended here, and this one was cut in two
    assert lengths(2, stem + left) == [4, 3, 2]
    assert lengths(2, stem + right) == [3, 4, 2]  # one time, but `left` stands between
    assert lengths(2, stem + left) == [4, 3, 2]
    assert lengths(3, stem) == [4, 3, 2]
    assert lengths(4, stem + left) == [4, 3, 2]  # neighbours, but of two times
    assert lengths(5, stem + left) == [4, 5]


@settings(max_examples=60, deadline=None)
@given(prefix_traces(longest=400, fresh=200), st.lists(st.integers(0, 30), max_size=5))
def test_olken_in_parts_equals_olken_at_once(trace: Trace, cuts: list[int]) -> None:
    packed = columns(trace)
    ids, distinct = densify(packed.hashes)
    tree, found, start = OlkenTree(distinct, int(np.diff(packed.offsets).max(initial=0))), [], 0
    for end in [*sorted(min(cut, len(trace)) for cut in cuts), len(trace)]:
        part = packed.slice(start, end)
        found.append(tree.touch(part.ts_us, part.offsets, ids[packed.offsets[start] : packed.offsets[end]]))
        start = end
    whole = olken_distances(packed.ts_us, packed.offsets, ids, distinct)
    assert all(np.array_equal(np.concatenate([part[i] for part in found]), whole[i]) for i in (0, 1))


# ---------------------------------------------------------------- memory: bounded by the depth, whatever the length


def strangers(first: int, chains: int, blocks: int) -> ChainColumns:
    """Chains whose blocks were never seen before, from number `first` on."""
    ids = np.arange(first, first + chains * blocks, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return ChainColumns.pack(range(chains), np.split(ids, chains), [blocks] * chains, 1)


def feed(stack: RunStack, packed: ChainColumns) -> Runs:
    return stack.touch(packed.ts_us, packed.offsets, packed.hashes)


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("blocks", [1, 50], ids=["single blocks", "chains"])
def test_bytes_stop_growing_with_the_stream(blocks: int, merge: bool) -> None:
    """10, 20 and 40 times the depth in distinct blocks, in chains and as single blocks: the arrays stay what they are."""
    depth = 5_000
    stack, held = RunStack(depth, filter_bits=16, merge=merge), {}
    for times in range(1, 41):
        feed(stack, strangers(times * depth, depth // blocks, blocks))
        held[times] = stack.nbytes
    assert held[10] == held[20] == held[40]
    assert stack.depth_blocks == depth and stack.trimmed_blocks == 39 * depth
    # A block that is a node of its own: 16 of the arena (grown to twice the need), 64 a node, 48 slots and tree, 64 of the table.
    assert held[40] < (16 + 64 + 48 + 64 if blocks == 1 else 30) * (depth + blocks) + (1 << 16) // 8 + 100_000


def test_nodes_and_bytes_are_bounded_when_reuse_cuts_runs_into_single_blocks() -> None:
    """Requests that end a block earlier each time cut a chain into single blocks; as many chains as it takes, the depth bounds them all."""
    depth, stack, most, held = 500, RunStack(500, filter_bits=12, merge=False), 0, []
    for start in range(0, 40 * depth, depth // 2):
        stem = np.arange(start, start + depth // 2, dtype=np.uint64)
        for step, keep in enumerate(range(stem.size, 0, -1)):
            feed(stack, ChainColumns.pack([step], [stem[:keep]], [keep], 1))
        most = max(most, int(stack._stack.at[kernel.LIVE]))
        held.append(stack.nbytes)
    check_sound(stack)
    assert most == depth and held[9] == held[19] == held[-1]


# ---------------------------------------------------------------- the filter of cut blocks


def test_a_long_stream_keeps_cold_and_beyond_apart() -> None:
    """After 40 fillings of the filter its strangers still read as cold, and what was cut of late as beyond."""
    stack = RunStack(1_024, filter_bits=16)
    stream = 40 * stack.remembered_blocks
    for first in range(0, stream, 4_096):
        feed(stack, strangers(first, 64, 64))
    assert stack.trimmed_blocks > 39 * stack.remembered_blocks
    cut_last = strangers(stream - 1_024 - stack.remembered_blocks, 1, stack.remembered_blocks).hashes
    assert stack.maybe_trimmed(cut_last).all()
    assert stack.maybe_trimmed(strangers(1 << 40, 1, 20_000).hashes).mean() < 0.07
    long_gone = stack.maybe_trimmed(strangers(0, 1, 20_000).hashes).mean()
    assert long_gone < 0.07  # forgotten with the older generation: they read as cold
    beyond = feed(stack, strangers(1 << 41, 2_000, 1)).beyond
    assert beyond.mean() < 0.07


def test_the_filter_follows_the_depth() -> None:
    small, large = RunStack(1_000), RunStack(1 << 20)
    assert small.remembered_blocks == (1 << 22) // 16
    assert large.remembered_blocks >= 1 << 20
    large.max_depth_blocks = 10
    assert large.remembered_blocks == small.remembered_blocks
    feed(large, strangers(0, 1, 50))
    large.max_depth_blocks = 1 << 20  # from the first cut on the filter stays what it is: what it knows cannot be spread out again
    assert large.remembered_blocks == small.remembered_blocks and large.maybe_trimmed(strangers(10, 1, 40).hashes).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 3_999))
def test_a_restored_filter_forgets_at_the_same_block(cut: int) -> None:
    whole, first = RunStack(10, filter_bits=10), RunStack(10, filter_bits=10)
    feed(whole, strangers(0, 4_000, 1))
    feed(first, strangers(0, cut, 1))
    second = RunStack.from_state(first.state())
    feed(second, strangers(cut, 4_000 - cut, 1))
    assert all(np.array_equal(value, second.state()[name]) for name, value in whole.state().items() if name != "ts_us")
