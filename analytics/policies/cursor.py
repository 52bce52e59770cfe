"""One cache walked through a trace, for policies that know only how to touch, evict and insert: the same kernel in two forms.

*Plain*: every block of every chain is an object of its own, asked for in chain order. *Prefix-safe*: a request is looked up as a whole and
hits its leading run; its blocks are pinned while it runs, then touched or stored from the deepest to the head, and a block with resident
children (or pinned) is `held`: no policy may evict it. So nothing outlives its parent, and all hits are prefix-contiguous.

A policy's kernel is a loop over `advance`:

    while advance(cursor, trace):
        key = cursor.at[KEY]
        if cursor.at[HIT]:
            ...touch key...
            continue
        while full(cursor):
            leave(cursor, trace, ...choose a key that is not held...)
        enter(cursor, trace, key)
        ...insert key...

A queue passes over what is held by appending it again: there is always a resident key that is not.

*Sizes*, in the plain form alone: a trace may give each dense id one (bytes, say). Then the capacity, `SIZE` and the shares of queues count
those, and an object larger than the capacity is passed by. Without them a block counts one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from analytics.fleet.workload import Workload
from analytics.policies.queues import kernel, size_of

Bools = npt.NDArray[np.bool_]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

PLAIN, PREFIX = 0, 1
# Scalars of a cursor: form, capacity in blocks, resident blocks, index of the access, its request and position in the chain, the dense id
# asked for, whether it is resident, accesses of the request still to come (prefix form), blocks of it that are looked at, accesses done,
# the size of the id asked for.
FORM, CAPACITY, SIZE, INDEX, REQUEST, POSITION, KEY, HIT, LEFT, LIMIT, CLOCK, INCOMING, SCALARS = range(13)


class Trace(NamedTuple):
    """Requests as kernels read them; codes are -1 where unknown.

    `ids` int32[blocks] dense, `offsets` int64[requests+1] · per request: `ts_us`, `prompt_tokens` int64, `tenant`, `session`, `category`
    (type), `turn` (from 1, 0 unknown) int32 · per dense id: `parent` (-1 for a head), `depth` int32, `sizes` int64 from 1 (None: all one)
    · `block_size` tokens.
    """

    ids: I32
    offsets: I64
    ts_us: I64
    prompt_tokens: I64
    tenant: I32
    session: I32
    category: I32
    turn: I32
    parent: I32
    depth: I32
    block_size: int
    sizes: I64 | None = None


class Cursor(NamedTuple):
    """State of one walk: `at` int64[SCALARS] · `resident` bool[n_ids] · `held` int32[n_ids] children and pins · `hits` bool[blocks]."""

    at: I64
    resident: Bools
    held: I32
    hits: Bools


def trace_of(workload: Workload) -> Trace:
    """The trace of a workload; a (tenant, hash) pair is one dense id. Cost: O(blocks)."""
    blocks, n = workload.blocks, len(workload)
    none = np.full(n, -1, np.int32)
    return Trace(
        blocks.ids,
        workload.offsets.astype(np.int64),
        workload.arrived_at_us.astype(np.int64),
        workload.prompt_tokens.astype(np.int64),
        workload.tenant.astype(np.int32),
        workload.session.astype(np.int32),
        none if workload.category is None else workload.category.astype(np.int32),
        np.zeros(n, np.int32) if workload.turn is None else workload.turn.astype(np.int32),
        parents(blocks.ids, workload.offsets, len(blocks.hashes)),
        blocks.positions.astype(np.int32),
        workload.block_size,
    )


def bare(ids: I32, n_ids: int) -> Trace:
    """A trace of which only the order of accesses is known: each is a request of one block, a microsecond after the one before."""
    n = ids.size
    none, zeros = np.full(n, -1, np.int32), np.zeros(n, np.int32)
    every = np.arange(n + 1, dtype=np.int64)
    heads = np.full(n_ids, -1, np.int32)
    return Trace(ids, every, every[:-1], np.ones(n, np.int64), zeros, none, none, zeros, heads, np.zeros(n_ids, np.int32), 1)


def predecessors(ids: I32, offsets: I64) -> I32:
    """Dense id of the block before each access in its chain, -1 for heads."""
    before = np.concatenate([[-1], ids])[: ids.size].astype(np.int32)
    before[offsets[:-1][np.diff(offsets) > 0]] = -1
    return before


def parents(ids: I32, offsets: I64, n_ids: int) -> I32:
    """Dense id of the block before each one, -1 for heads; of an id behind two different ones (no prefix hash) the first counts."""
    out = np.full(n_ids, -1, np.int32)
    out[ids[::-1]] = predecessors(ids, offsets)[::-1]
    return out


def new_cursor(trace: Trace, capacity: int, form: int) -> Cursor:
    """An empty cache before the first access. Memory: 5 B a dense id and 1 B an access."""
    at = np.zeros(SCALARS, np.int64)
    at[FORM], at[CAPACITY], at[INDEX], at[REQUEST], at[INCOMING] = form, capacity, -1, -1, 1
    n_ids = trace.parent.size
    return Cursor(at, np.zeros(n_ids, np.bool_), np.zeros(n_ids, np.int32), np.zeros(trace.ids.size, np.bool_))


@kernel
def full(cursor: Cursor) -> bool:
    """Whether a block must leave before another may enter."""
    return cursor.at[SIZE] + cursor.at[INCOMING] > cursor.at[CAPACITY]


@kernel
def enter(cursor: Cursor, trace: Trace, key: int) -> None:
    """Book a block in; in the prefix form it holds its parent, and the running request holds it."""
    cursor.resident[key] = True
    cursor.at[SIZE] += size_of(trace.sizes, key)
    if cursor.at[FORM] == PREFIX:
        cursor.held[key] += 1
        if trace.parent[key] >= 0:
            cursor.held[trace.parent[key]] += 1


@kernel
def leave(cursor: Cursor, trace: Trace, key: int) -> None:
    """Book a block out. In the prefix form it must not be held."""
    cursor.resident[key] = False
    cursor.at[SIZE] -= size_of(trace.sizes, key)
    if cursor.at[FORM] == PREFIX and trace.parent[key] >= 0:
        cursor.held[trace.parent[key]] -= 1


@kernel
def advance(cursor: Cursor, trace: Trace) -> bool:
    """Go to the next access; false at the end. A miss must be entered before the next call (in the plain form it may be refused)."""
    at = cursor.at
    at[CLOCK] += 1
    if at[FORM] == PREFIX:
        return _advance_prefix(cursor, trace)
    at[INDEX] += 1
    _measure(at, trace.ids, trace.sizes)
    if at[INDEX] == trace.ids.size:
        return False
    while at[REQUEST] < 0 or at[INDEX] >= trace.offsets[at[REQUEST] + 1]:
        at[REQUEST] += 1
    at[POSITION] = at[INDEX] - trace.offsets[at[REQUEST]]
    at[KEY] = trace.ids[at[INDEX]]
    at[HIT] = cursor.resident[at[KEY]]
    cursor.hits[at[INDEX]] = at[HIT]
    return True


@kernel
def _measure(at: I64, ids: I32, sizes: I64 | None) -> None:
    """Where there are sizes, take that of the access, past those larger than the cache."""
    if sizes is not None:
        while at[INDEX] < ids.size and sizes[ids[at[INDEX]]] > at[CAPACITY]:
            at[INDEX] += 1
        if at[INDEX] < ids.size:
            at[INCOMING] = sizes[ids[at[INDEX]]]


@kernel
def _advance_prefix(cursor: Cursor, trace: Trace) -> bool:
    at = cursor.at
    while at[LEFT] == 0:
        if at[REQUEST] >= 0:
            _pin(cursor, trace, at[LIMIT], -1)
        at[REQUEST] += 1
        if at[REQUEST] == trace.offsets.size - 1:
            return False
        _look_up(cursor, trace)
    at[LEFT] -= 1
    at[POSITION] = at[LEFT]
    at[INDEX] = trace.offsets[at[REQUEST]] + at[LEFT]
    at[KEY] = trace.ids[at[INDEX]]
    at[HIT] = cursor.hits[at[INDEX]]
    return True


@kernel
def _look_up(cursor: Cursor, trace: Trace) -> None:
    """Mark and pin the leading run. Of a chain longer than the cache only as much as fits is looked at."""
    at = cursor.at
    start = trace.offsets[at[REQUEST]]
    length, run = trace.offsets[at[REQUEST] + 1] - start, 0
    while run < length and cursor.resident[trace.ids[start + run]]:
        cursor.hits[start + run] = True
        run += 1
    at[LIMIT] = at[LEFT] = min(length, at[CAPACITY])
    _pin(cursor, trace, run, 1)


@kernel
def _pin(cursor: Cursor, trace: Trace, count: int, change: int) -> None:
    start = trace.offsets[cursor.at[REQUEST]]
    for i in range(start, start + count):
        cursor.held[trace.ids[i]] += change
