"""Merlin in both forms: a filter, a staging and a core FIFO behind a guard that says how often a block of the core must be used."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from analytics.policies.cursor import CAPACITY, HIT, KEY, Cursor, Trace, advance, full
from analytics.policies.lists import depart, front_free, store
from analytics.policies.queues import Queues, append, kernel, length, make_queues, pop, queue_of, remove
from analytics.policies.sketch import Sketch, add, estimate, halve, make_sketch

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

FILTER, STAGING, CORE, GHOST = range(4)
FILTER_SHARE, STAGING_SHARE = 0.10, 0.05
MAX_FREQUENCY, HALVE_AFTER_EPOCHS, IGNORE_ABOVE = 7, 32, 32
COUNTERS, HASHES = 14.4, 10  # a Bloom filter of error 0.001 a block of capacity
GUARD, EVICTED = range(2)


def merlin(trace: Trace, cursor: Cursor, capacity: int) -> None:
    """Merlin: new blocks pass a filter of 10 %, returning ones a staging of 5 %; the core takes what was used as often as a guard says.

    The guard is the least number of uses that fewer blocks than the core holds have reached, ghosts included; it moves by at most one level
    at a time until that is so. A block in the filter duels with the one that is about to leave staging by a sketch of returns. Rules as the
    published code has them, from a description; what is held passes. Source: OSDI 2026 (merlin.cpp).
    """
    n_ids = trace.parent.size
    rooms = np.array([max(1, int(share * capacity)) for share in (FILTER_SHARE, STAGING_SHARE)] + [0], np.int64)
    rooms[CORE] = max(capacity - rooms[FILTER] - rooms[STAGING], 1)
    sketch, frequency = make_sketch(int(COUNTERS * capacity), HASHES, 1 << 30), np.full(n_ids, -1, np.int32)
    tally, state = np.zeros(MAX_FREQUENCY + 1, np.int64), np.array([1, 0], np.int64)
    _merlin(trace, cursor, make_queues(n_ids, capacity + 1), frequency, tally, sketch, rooms, state, np.zeros(n_ids, np.int32))


@kernel
def _merlin(
    trace: Trace, cursor: Cursor, queues: Queues, frequency: I32, tally: I64, sketch: Sketch, rooms: I64, state: I64, past: I32
) -> None:
    """`frequency` of a tracked block (resident or ghost), -1 for others; `tally` counts tracked blocks by it.

    A block that comes back to staging starts at 0 there; `past` is what it had as a ghost, and has again if it leaves unused.
    """
    while advance(cursor, trace):
        key = cursor.at[KEY]
        returning = queue_of(queues, key) == GHOST
        if cursor.at[HIT] or returning:
            _set(frequency, tally, key, min(frequency[key] + 1, MAX_FREQUENCY))
        if cursor.at[HIT]:
            continue
        if returning:
            remove(queues, key)
        while full(cursor):
            _evict(trace, cursor, queues, frequency, tally, sketch, rooms, state, past)
        if returning and frequency[key] >= state[GUARD]:
            store(cursor, trace, queues, CORE, key)
        elif returning:
            store(cursor, trace, queues, STAGING, key)
            add(sketch, key)
            past[key] = frequency[key]
            _set(frequency, tally, key, 0)
        else:
            _set(frequency, tally, key, 0)
            warming = state[EVICTED] == 0 and length(queues, FILTER) + length(queues, STAGING) == 0
            store(cursor, trace, queues, CORE if warming else FILTER, key)


@kernel
def _set(frequency: I32, tally: I64, key: int, to: int) -> None:
    """Note a block's frequency, -1 to forget it."""
    if frequency[key] >= 0:
        tally[frequency[key]] -= 1
    frequency[key] = to
    if to >= 0:
        tally[to] += 1


@kernel
def _move_guard(tally: I64, room: int, guard: int) -> int:
    """Raise it while more blocks than the core holds have reached it, lower it while fewer have reached the level below."""
    reached = 0
    for level in range(MAX_FREQUENCY, guard - 1, -1):
        reached += tally[level]
    while guard < MAX_FREQUENCY and reached > room:
        reached -= tally[guard]
        guard += 1
    while guard > 1 and reached + tally[guard - 1] < room:
        guard -= 1
        reached += tally[guard]
    return guard


@kernel
def _evict(
    trace: Trace, cursor: Cursor, queues: Queues, frequency: I32, tally: I64, sketch: Sketch, rooms: I64, state: I64, past: I32
) -> None:
    state[GUARD] = _move_guard(tally, rooms[CORE], state[GUARD])
    state[EVICTED] += 1
    if state[EVICTED] % (HALVE_AFTER_EPOCHS * cursor.at[CAPACITY]) == 0:
        halve(sketch)
    victim = _from_filter(cursor, queues, frequency, tally, sketch, rooms, state[GUARD])
    while victim < 0 and length(queues, CORE) > rooms[CORE]:
        append(queues, STAGING, pop(queues, CORE))
    if victim < 0:
        victim = _from_staging(cursor, queues, frequency, tally)
    for queue in (CORE, FILTER, STAGING):
        if victim < 0:
            victim = front_free(cursor, queues, queue)
    remove(queues, victim)
    depart(cursor, trace, queues, victim)
    if length(queues, GHOST) >= cursor.at[CAPACITY]:
        _set(frequency, tally, pop(queues, GHOST), -1)
    append(queues, GHOST, victim)
    _set(frequency, tally, victim, max(frequency[victim], past[victim]))
    past[victim] = 0


@kernel
def _from_filter(cursor: Cursor, queues: Queues, frequency: I32, tally: I64, sketch: Sketch, rooms: I64, guard: int) -> int:
    """Victim of a filter that is full, -1 where it is not or all of it passes or is held."""
    while length(queues, FILTER) >= rooms[FILTER]:
        key = front_free(cursor, queues, FILTER)
        if key < 0:
            return -1
        if frequency[key] < guard:
            rival = front_free(cursor, queues, STAGING)
            if rival >= 0 and frequency[rival] == 0 and _returns(sketch, key) > _returns(sketch, rival):
                remove(queues, key)
                append(queues, STAGING, key)
                return rival
            return key
        remove(queues, key)
        append(queues, CORE, key)
        _set(frequency, tally, key, 0)
    return -1


@kernel
def _from_staging(cursor: Cursor, queues: Queues, frequency: I32, tally: I64) -> int:
    """First block of staging that was not used there; those before it go to the core. -1 for none."""
    for _ in range(length(queues, STAGING)):
        key = front_free(cursor, queues, STAGING)
        if key < 0 or frequency[key] == 0:
            return key
        remove(queues, key)
        append(queues, CORE, key)
        _set(frequency, tally, key, frequency[key] - 1)
    return -1


@kernel
def _returns(sketch: Sketch, key: int) -> int:
    """What the sketch says, 0 where it says too much to be true."""
    times = estimate(sketch, key)
    return times if times <= IGNORE_ABOVE else 0
