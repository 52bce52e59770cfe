"""Compiled core of the run-level exact LRU stack; `run_exact` is its front and says what it means.

Shapes. A *node* is a stretch of one chain whose blocks stand together in the stack: where its hashes lie in `arena`, its length, its
slot and when it was last touched. `slots` maps a slot to its node (-1: none); a higher slot is nearer the top. `fenwick` holds
the nodes' lengths by slot. `table` finds a node by its first hash: open addressing, pairs (hash, node + 1), at most half full, and
exactly one entry a node. A request is looked up first, without a change; then, when there is room for all it may need, it is carried out.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from analytics.reuse.compiling import uncounted
from analytics.reuse.stack_parts import (
    REMEMBERED_A_WORD,
    add_weight,
    append_weight,
    copy,
    filter_add,
    filter_clear,
    filter_has,
    find,
    insert,
    matching,
    remove,
    weight_up_to,
)

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

# Scalars of the stack, in `Stack.at`; YOUNG is the filter's generation that takes what is cut, CUT how many it has taken.
DEPTH, TOP, BOTTOM, USED, NODES, FREE, LIVE, TRIMMED, MAX_DEPTH, RUNS, NEED_PIECES, NEED_BLOCKS, MERGE, YOUNG, CUT, SCALARS = range(16)
# Fields of a node; START of a freed node is the next free one.
START, LENGTH, SLOT, TS, NODE_FIELDS = range(5)
# Columns of `Stack.pieces`, one row for each node that the request in hand reaches.
NODE, MATCHED, ABOVE, PIECE_FIELDS = range(4)

NO_LIMIT = 1 << 62
# Neighbours touched together again are copied into one node while the upper is at most twice as long as what it joins: a chain
# that grows turn by turn then holds O(log n) nodes and each of its blocks is copied O(log n) times. The rule looks at lengths and times
# only, never at where hashes lie, so that a stack restored from its state keeps the very same nodes.
MERGE_FACTOR = 2
MERGE_FREELY_BLOCKS = 64


class Stack(NamedTuple):
    """Arrays of one stack."""

    at: I64
    nodes: I64
    slots: I32
    fenwick: I64
    table: U64
    arena: U64
    known: U64
    pieces: I64


class RunColumns(NamedTuple):
    """Room for the runs of one call."""

    request: I32
    position: I32
    length: I32
    distance: I64
    age_us: I64
    beyond: I32


# ---------------------------------------------------------------- nodes


@uncounted
def _new_node(stack: Stack, start: int, length: int) -> int:
    at, node = stack.at, stack.at[FREE]
    if node >= 0:
        at[FREE] = stack.nodes[node, START]
    else:
        node = at[NODES]
        at[NODES] += 1
    at[LIVE] += 1
    stack.nodes[node, START], stack.nodes[node, LENGTH] = start, length
    return node


@uncounted
def _recycle(stack: Stack, node: int) -> None:
    stack.nodes[node, LENGTH], stack.nodes[node, START] = 0, stack.at[FREE]
    stack.at[FREE] = node
    stack.at[LIVE] -= 1


@uncounted
def _free_node(stack: Stack, node: int) -> None:
    """Forget a node that no longer stands in the stack, and its table entry."""
    remove(stack.table, stack.arena[stack.nodes[node, START]])
    _recycle(stack, node)


@uncounted
def _push(stack: Stack, node: int, ts_us: int) -> None:
    """Put a node that stands in no slot on top."""
    at = stack.at
    at[TOP] += 1
    length = stack.nodes[node, LENGTH]
    stack.slots[at[TOP]] = node
    append_weight(stack.fenwick, at[TOP], length)
    stack.nodes[node, SLOT], stack.nodes[node, TS] = at[TOP], ts_us
    at[DEPTH] += length


@uncounted
def _detach(stack: Stack, node: int, matched: int) -> None:
    """Take the first `matched` blocks of a node out of its slot; the rest stays there as a node of its own."""
    at, nodes = stack.at, stack.nodes
    slot, length, start = nodes[node, SLOT], nodes[node, LENGTH], nodes[node, START]
    leaving = length
    stack.slots[slot] = -1
    if matched < length:
        tail = _new_node(stack, start + matched, length - matched)
        if insert(stack.table, stack.arena[start + matched], tail):
            nodes[tail, SLOT], nodes[tail, TS] = slot, nodes[node, TS]
            stack.slots[slot] = tail
            leaving = matched
        else:  # outside the contract: another node begins with this hash, so the rest could not be found and is dropped
            _recycle(stack, tail)
        nodes[node, LENGTH] = matched
    add_weight(stack.fenwick, at[TOP], slot, -leaving)
    at[DEPTH] -= leaving


# ---------------------------------------------------------------- look-up


@uncounted
def _look_up(stack: Stack, hashes: U64, lo: int, hi: int) -> tuple[int, int, bool]:
    """Fill `pieces` with what the chain reaches: (pieces, first cold hash, whether the cold rest may be stored).

    In a chain whose hashes commit to their prefix every further node lies below the one before; where that fails the walk ends and
    the rest is neither matched nor stored, which keeps any input from reaching a node twice.
    """
    at, nodes, pieces = stack.at, stack.nodes, stack.pieces
    count, first, above = 0, lo, 0
    slot_before, length_before = NO_LIMIT, 0
    while first < hi:
        place = find(stack.table, hashes[first])
        if place < 0:
            break
        node = np.int64(stack.table[2 * place + 1]) - 1
        slot, length = nodes[node, SLOT], nodes[node, LENGTH]
        if slot >= slot_before:
            return count, first, False
        above = above + length_before if slot == slot_before - 1 else at[DEPTH] - weight_up_to(stack.fenwick, slot)
        matched = matching(stack.arena, nodes[node, START], hashes, first, min(length, hi - first))
        pieces[count, NODE], pieces[count, MATCHED], pieces[count, ABOVE] = node, matched, above
        slot_before, length_before = slot, length
        first += matched
        count += 1
    return count, first, True


@uncounted
def _has_room(stack: Stack, out: RunColumns, pieces: int, blocks: int, cold: int) -> bool:
    """Whether a request of that many pieces (the cold rest counted) and blocks can be carried out; if not, says what it needs."""
    at = stack.at
    at[NEED_PIECES], at[NEED_BLOCKS] = pieces, blocks
    return (
        at[RUNS] + pieces <= out.request.size
        and at[TOP] + pieces < stack.slots.size
        and at[LIVE] + pieces <= stack.nodes.shape[0]
        and 4 * (at[LIVE] + pieces) <= stack.table.size
        and at[USED] + blocks <= stack.arena.size
        and (at[DEPTH] + cold <= at[MAX_DEPTH] or stack.known.size > 1)
    )


@uncounted
def _emit(stack: Stack, out: RunColumns, request: int, count: int, ts_us: int) -> int:
    """Write the reused runs, pieces that stand together and have one age as one run; returns their number of blocks."""
    at, position, first_run = stack.at, 0, stack.at[RUNS]
    for i in range(count):
        length, above = stack.pieces[i, MATCHED], stack.pieces[i, ABOVE]
        age = max(ts_us - stack.nodes[stack.pieces[i, NODE], TS], 0)
        run = at[RUNS] - 1
        if run >= first_run and out.age_us[run] == age and out.distance[run] + out.length[run] == above:
            out.length[run] += length
        else:
            _write(out, run + 1, request, position, length, above, age, 0)
            at[RUNS] += 1
        position += length
    return position


@uncounted
def _write(out: RunColumns, run: int, request: int, position: int, length: int, distance: int, age: int, beyond: int) -> None:
    out.request[run], out.position[run], out.length[run] = request, position, length
    out.distance[run], out.age_us[run], out.beyond[run] = distance, age, beyond


# ---------------------------------------------------------------- touch


@uncounted
def _append(stack: Stack, hashes: U64, lo: int, hi: int) -> None:
    copy(stack.arena, stack.at[USED], hashes, lo, hi - lo)
    stack.at[USED] += hi - lo


@uncounted
def _worth_joining(upper: int, lower: int) -> bool:
    return upper <= max(MERGE_FACTOR * lower, MERGE_FREELY_BLOCKS)


@uncounted
def _group(stack: Stack, last: int) -> tuple[int, int]:
    """First piece and length of the group to be merged that ends with piece `last`."""
    pieces, nodes = stack.pieces, stack.nodes
    first, length = last, pieces[last, MATCHED]
    while first > 0 and stack.at[MERGE] != 0:
        upper, lower = pieces[first - 1, NODE], pieces[first, NODE]
        together = pieces[first - 1, ABOVE] + pieces[first - 1, MATCHED] == pieces[first, ABOVE]
        if not together or nodes[upper, TS] != nodes[lower, TS]:
            break
        if not _worth_joining(pieces[first - 1, MATCHED], length):
            break
        first -= 1
        length += pieces[first, MATCHED]
    return first, length


@uncounted
def _merge(stack: Stack, hashes: U64, first: int, last: int, lo: int, hi: int) -> None:
    """Make the detached nodes of pieces first..last one node over hashes[lo:hi]; what is the arena's newest already is not copied."""
    nodes, base = stack.nodes, stack.pieces[first, NODE]
    for i in range(first + 1, last + 1):
        _free_node(stack, stack.pieces[i, NODE])
    if nodes[base, START] + nodes[base, LENGTH] == stack.at[USED]:
        lo += nodes[base, LENGTH]
    else:
        nodes[base, START] = stack.at[USED]
        nodes[base, LENGTH] = 0
    _append(stack, hashes, lo, hi)
    nodes[base, LENGTH] += hi - lo


@uncounted
def _push_cold(stack: Stack, hashes: U64, first: int, hi: int, ts_us: int) -> None:
    """Store the cold rest as a node of its own, unless, outside the contract, another node begins with its first hash by now."""
    node = _new_node(stack, stack.at[USED], hi - first)
    if insert(stack.table, hashes[first], node):
        _append(stack, hashes, first, hi)
        _push(stack, node, ts_us)
    else:
        _recycle(stack, node)


@uncounted
def _raise(stack: Stack, hashes: U64, hi: int, count: int, first: int, store: bool, ts_us: int) -> None:
    """Make the request's blocks the newest: tail first, so that the head ends on top. hashes[first:hi] is the cold rest."""
    pieces, last = stack.pieces, count - 1
    grow = False
    if stack.at[MERGE] != 0 and store and first < hi and count > 0 and pieces[last, MATCHED] == stack.nodes[pieces[last, NODE], LENGTH]:
        grow = _worth_joining(pieces[last, MATCHED], hi - first)
    for i in range(count):
        _detach(stack, pieces[i, NODE], pieces[i, MATCHED])
    end = first
    if grow:
        pieces[last, MATCHED] += hi - first
        end = hi
    elif store and first < hi:
        _push_cold(stack, hashes, first, hi, ts_us)
    while last >= 0:
        upper, length = _group(stack, last)
        if upper < last or grow:
            _merge(stack, hashes, upper, last, end - length, end)
        _push(stack, pieces[upper, NODE], ts_us)
        end -= length
        last = upper - 1
        grow = False


# ---------------------------------------------------------------- depth limit


@uncounted
def _leading_known(stack: Stack, hashes: U64, first: int, hi: int) -> int:
    count = 0
    if stack.at[TRIMMED] > 0:
        while first + count < hi and filter_has(stack.known, hashes[first + count]):
            count += 1
    return count


@uncounted
def _remember(stack: Stack, block: int) -> None:
    """Enter a block that is cut; a full generation is followed by the older one, emptied, so that the filter never fills up."""
    at = stack.at
    if at[CUT] >= REMEMBERED_A_WORD * (stack.known.size // 2):
        at[YOUNG], at[CUT] = 1 - at[YOUNG], 0
        filter_clear(stack.known, at[YOUNG])
    filter_add(stack.known, at[YOUNG], block)
    at[CUT] += 1


@uncounted
def _trim(stack: Stack) -> None:
    """Cut the bottom of the stack down to the greatest depth; the filter remembers what went."""
    at, nodes = stack.at, stack.nodes
    while at[DEPTH] > at[MAX_DEPTH]:
        while stack.slots[at[BOTTOM]] < 0:
            at[BOTTOM] += 1
        slot = at[BOTTOM]
        node = stack.slots[slot]
        length = nodes[node, LENGTH]
        cut = min(length, at[DEPTH] - at[MAX_DEPTH])
        end = nodes[node, START] + length
        for i in range(end - cut, end):
            _remember(stack, stack.arena[i])
        add_weight(stack.fenwick, at[TOP], slot, -cut)
        at[DEPTH] -= cut
        at[TRIMMED] += cut
        if cut == length:
            stack.slots[slot] = -1
            _free_node(stack, node)
        else:
            nodes[node, LENGTH] = length - cut


# ---------------------------------------------------------------- entry points


@uncounted
def touch(stack: Stack, out: RunColumns, ts_us: I64, offsets: I64, hashes: U64, start: int) -> int:
    """Carry out requests from `start` on; returns the first one for which there was no room, or their number."""
    for request in range(start, ts_us.size):
        lo, hi = offsets[request], offsets[request + 1]
        count, first, store = _look_up(stack, hashes, lo, hi)
        if not _has_room(stack, out, count + 1, hi - lo, hi - first):
            return request
        reused = _emit(stack, out, request, count, ts_us[request])
        if first < hi:
            beyond = _leading_known(stack, hashes, first, hi)
            _write(out, stack.at[RUNS], request, reused, hi - first, -1, -1, beyond)
            stack.at[RUNS] += 1
        _raise(stack, hashes, hi, count, first, store, ts_us[request])
        _trim(stack)
    return ts_us.size


@uncounted
def renumber(stack: Stack, slots: I32, fenwick: I64) -> None:
    """Move live slots together into new arrays, keeping their order."""
    live = 0
    for slot in range(1, stack.at[TOP] + 1):
        node = stack.slots[slot]
        if node >= 0:
            live += 1
            slots[live] = node
            stack.nodes[node, SLOT] = live
            append_weight(fenwick, live, stack.nodes[node, LENGTH])
    stack.at[TOP], stack.at[BOTTOM] = live, 1


@uncounted
def repack(stack: Stack, arena: U64) -> None:
    """Copy the hashes that still stand in the stack into a new arena, bottom first."""
    used = 0
    for slot in range(1, stack.at[TOP] + 1):
        node = stack.slots[slot]
        if node >= 0:
            start, length = stack.nodes[node, START], stack.nodes[node, LENGTH]
            copy(arena, used, stack.arena, start, length)
            stack.nodes[node, START] = used
            used += length
    stack.at[USED] = used


@uncounted
def rehash(stack: Stack, table: U64) -> None:
    """Enter every node in a new, empty table."""
    for slot in range(1, stack.at[TOP] + 1):
        node = stack.slots[slot]
        if node >= 0:
            insert(table, stack.arena[stack.nodes[node, START]], node)
