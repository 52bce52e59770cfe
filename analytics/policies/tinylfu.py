"""W-TinyLFU in both forms: an LRU window before a segmented main LRU whose door only the more frequent pass."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from analytics.policies.cursor import HIT, KEY, Cursor, Trace, advance, full
from analytics.policies.lists import depart, front_free, store
from analytics.policies.queues import Queues, append, front, kernel, length, make_queues, pop, queue_of, remove
from analytics.policies.sketch import Sketch, add, estimate, halve, make_sketch

I64 = npt.NDArray[np.int64]

WINDOW, PROBATION, PROTECTED = range(3)
WINDOW_SHARE, PROTECTED_SHARE = 0.01, 0.80


def w_tinylfu(
    trace: Trace,
    cursor: Cursor,
    capacity: int,
    sample: float = 10.0,
    counters: float = 16.0,
    hashes: int = 4,
    most: int = 15,
    peer: int = 0,
) -> None:
    """W-TinyLFU: a window of 1 %; what leaves it must have been asked for more often than the main part's own victim, or goes.

    Main is a segmented LRU, 80 % of it protected. Uses are counted in a sketch of `counters` a block of capacity, at most up to `most`, and
    halved after `sample` uses a block of capacity; there is no doorkeeper. With `peer` it does as libCacheSim: hits in the window do not
    count but duels do, all counters of a key rise, and the first fill goes to the protected part too (its sketch has 14.4 counters, 10
    hashes, no limit, and sample 32). Source: Einziger, Friedman and Manes, ACM ToS 13(4), 2017.
    """
    n_ids, window = trace.parent.size, max(1, int(WINDOW_SHARE * capacity))
    rooms = np.array([window, capacity - window, int(PROTECTED_SHARE * (capacity - window))], np.int64)
    sketch = make_sketch(int(counters * capacity), hashes, most, peer == 0)
    _w_tinylfu(trace, cursor, make_queues(n_ids, capacity + 1), sketch, rooms, int(max(sample * capacity, 1)), peer != 0)


@kernel
def _w_tinylfu(trace: Trace, cursor: Cursor, queues: Queues, sketch: Sketch, rooms: I64, period: int, peer: bool) -> None:
    """`rooms`: window, main, protected."""
    counted = 0
    while advance(cursor, trace):
        key, queue = cursor.at[KEY], queue_of(queues, cursor.at[KEY])
        if not (peer and queue == WINDOW):
            add(sketch, key)
            counted += 1
            if counted % period == 0:
                halve(sketch)
        if cursor.at[HIT]:
            remove(queues, key)
            append(queues, WINDOW if queue == WINDOW else PROTECTED, key)
            while length(queues, PROTECTED) > rooms[2]:
                append(queues, PROBATION, pop(queues, PROTECTED))
            continue
        while full(cursor):
            _evict(trace, cursor, queues, sketch, rooms, peer)
        store(cursor, trace, queues, WINDOW, key)


@kernel
def _evict(trace: Trace, cursor: Cursor, queues: Queues, sketch: Sketch, rooms: I64, peer: bool) -> None:
    """Move what is too much for the window to main while there is room; then duel. What is held always passes."""
    while length(queues, WINDOW) > 0 and length(queues, PROBATION) + length(queues, PROTECTED) < rooms[1]:
        key = pop(queues, WINDOW)
        append(queues, PROTECTED if peer and length(queues, PROBATION) >= rooms[1] - rooms[2] else PROBATION, key)
        if peer:
            add(sketch, key)
    victim = -1
    while victim < 0 and length(queues, WINDOW) > 0:
        candidate, rival = front(queues, WINDOW), front_free(cursor, queues, PROBATION)
        if rival < 0:
            rival = front_free(cursor, queues, PROTECTED)
        if rival < 0:
            break
        if cursor.held[candidate] > 0 or estimate(sketch, candidate) > estimate(sketch, rival):
            append(queues, PROBATION, pop(queues, WINDOW))
            victim = rival
        else:
            victim = candidate
        if peer:
            add(sketch, candidate)
    if victim < 0:
        victim = front_free(cursor, queues, WINDOW)
    if victim < 0:
        victim = front_free(cursor, queues, PROBATION)
    if victim < 0:
        victim = front_free(cursor, queues, PROTECTED)
    remove(queues, victim)
    depart(cursor, trace, queues, victim)
