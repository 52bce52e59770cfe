"""S3-FIFO and S4-FIFO in both forms: a small queue on probation, a main one, a ghost, and five knobs."""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt

from analytics.policies.cursor import CAPACITY, FORM, HIT, KEY, REQUEST, Cursor, Trace, advance, enter, full, new_cursor
from analytics.policies.fifos import GHOST, GHOST_SHARE, MAIN, MAX_FREQUENCY, SMALL, SMALL_SHARE, TO_MAIN
from analytics.policies.free import freed_parent
from analytics.policies.lists import depart, overdue, pass_over
from analytics.policies.queues import QUEUES, Queues, append, kernel, length, make_queues, pop, queue_of, remove, size_of

I8 = npt.NDArray[np.int8]
I64 = npt.NDArray[np.int64]

# Knobs: blocks of the small queue and of the ghost, insertions before hits count, hits that lead from small to main, from ghost to main.
SMALL_ROOM, GHOST_ROOM, SKIP, FROM_SMALL, FROM_GHOST = range(5)
LEARN_SHARE = 0.2
# Small share, ghost share, skip share, hits to main from small, from the ghost. The first is S3-FIFO, the one to beat. A ghost that admits
# only what was hit before goes with large small queues alone: with short ones a wrong choice costs a third of the hits.
CONFIGURATIONS = (
    [(SMALL_SHARE, GHOST_SHARE, 0.0, TO_MAIN, 0)]
    + [(*rooms, *hits, 0) for rooms, hits in product([(0.05, 3.0), (0.2, 0.9), (0.5, 3.0), (0.9, 6.0)], [(0.0, 1), (0.25, 2)])]
    + [(small, ghost, 0.0, 1, 1) for small, ghost in [(0.5, 3.0), (0.9, 6.0)]]
)


def s3fifo(trace: Trace, cursor: Cursor, capacity: int) -> None:
    """S3-FIFO as libCacheSim has it since 2024-12: small 10 %, ghost 90 % of the capacity, two more touches lead from small to main.

    Frequencies stop at 3. Until something is evicted, what finds the small queue full goes to main. Below 10 blocks the small queue
    keeps one. Source: Yang et al., SOSP 2023.
    """
    _replay(trace, cursor, capacity, [CONFIGURATIONS[0]], 0)


def s4fifo(trace: Trace, cursor: Cursor, capacity: int, margin: float = 0.005) -> None:
    """S3-FIFO whose five knobs are set once, after a fifth of the requests, by what would have hit most in that fifth.

    The paper's model (boosted trees over hit-position histograms, trained on other traces) is not public; here each of 11 configurations
    is replayed on the fifth that was seen, and S3-FIFO's own stays unless another hits `margin` of the accesses more (the paper's anchoring
    at the baseline). Cost: 2.2 times S3-FIFO on top of the walk. Source: S4-FIFO, OSDI 2026, arXiv 2608.27975.
    """
    learned = int(LEARN_SHARE * (trace.offsets.size - 1))
    seen = trace._replace(ids=trace.ids[: trace.offsets[learned]], offsets=trace.offsets[: learned + 1])
    hits = []
    for knobs in CONFIGURATIONS if seen.ids.size else CONFIGURATIONS[:1]:
        trial = new_cursor(seen, capacity, int(cursor.at[FORM]))
        _replay(seen, trial, capacity, [knobs], 0)
        hits.append(int(trial.hits.sum()))
    best = int(np.argmax(hits))
    if hits[best] - hits[0] <= margin * seen.ids.size:
        best = 0
    _replay(trace, cursor, capacity, [CONFIGURATIONS[0], CONFIGURATIONS[best]], learned)


def _replay(trace: Trace, cursor: Cursor, capacity: int, settings: list[tuple[float, float, float, int, int]], change_at: int) -> None:
    """Walk with the first setting, from request `change_at` on with the last."""
    knobs = np.array([_blocks(int(cursor.at[CAPACITY]), *setting) for setting in settings], np.int64)
    most = max(capacity, min(int(knobs[:, GHOST_ROOM].max()), trace.parent.size))
    queues = make_queues(trace.parent.size, most, trace.sizes)
    frequency, born = np.full(trace.parent.size, -1, np.int8), np.zeros(trace.parent.size, np.int64)
    # Request at which a queue was found to hold nothing that may leave: until the next one, only a child's leaving can change that.
    stuck = np.full(QUEUES, -1, np.int64)
    _walk(trace, cursor, queues, frequency, born, stuck, knobs, change_at)


def _blocks(capacity: int, small: float, ghost: float, skip: float, from_small: int, from_ghost: int) -> list[int]:
    room = max(1, int(small * capacity))
    return [room, int(ghost * capacity), int(skip * room), from_small, from_ghost]


@kernel
def _walk(trace: Trace, cursor: Cursor, queues: Queues, frequency: I8, born: I64, stuck: I64, knobs: I64, change_at: int) -> None:
    """`frequency` of a block that is not resident is -1 less what it was when it left; `born` the insertions before its own."""
    inserted, evicted = 0, False
    while advance(cursor, trace):
        key, now = cursor.at[KEY], knobs[0 if cursor.at[REQUEST] < change_at else knobs.shape[0] - 1]
        if cursor.at[HIT]:
            if inserted - born[key] >= now[SKIP]:
                frequency[key] = min(frequency[key] + 1, MAX_FREQUENCY)
            continue
        returning = queue_of(queues, key) == GHOST
        if returning:
            remove(queues, key)
        while full(cursor):
            evicted = True
            _evict(trace, cursor, queues, frequency, stuck, now)
        to_main = (returning and -1 - frequency[key] >= now[FROM_GHOST]) or (not evicted and length(queues, SMALL) >= now[SMALL_ROOM])
        append(queues, MAIN if to_main else SMALL, key)
        frequency[key], born[key] = 0, inserted
        inserted += 1
        enter(cursor, trace, key)


@kernel
def _evict(trace: Trace, cursor: Cursor, queues: Queues, frequency: I8, stuck: I64, now: I64) -> None:
    """Evict from main if it is over its share, else from small; from the other one where nothing may leave."""
    main_first = length(queues, MAIN) > cursor.at[CAPACITY] - now[SMALL_ROOM] or length(queues, SMALL) == 0
    key = _from_main(cursor, queues, frequency, stuck) if main_first else -1
    if key < 0:
        key = _from_small(cursor, queues, frequency, stuck, now[FROM_SMALL])
        while key >= 0 and length(queues, GHOST) > 0 and length(queues, GHOST) + size_of(trace.sizes, key) > now[GHOST_ROOM]:
            pop(queues, GHOST)
        if key >= 0 and now[GHOST_ROOM] >= size_of(trace.sizes, key):
            append(queues, GHOST, key)
    if key < 0:
        key = _from_main(cursor, queues, frequency, stuck)
    depart(cursor, trace, queues, key)
    frequency[key] = -1 - frequency[key]
    parent = freed_parent(cursor, trace, key)
    if parent >= 0:
        stuck[queue_of(queues, parent)] = -1


@kernel
def _from_main(cursor: Cursor, queues: Queues, frequency: I8, stuck: I64) -> int:
    """Take out the first that was not touched since it was last here; -1 where all are held. The held ones passed over lose a touch too."""
    passed, key = 0, overdue(cursor, queues, MAIN)
    if key >= 0 and frequency[key] == 0:
        remove(queues, key)
        return key
    while stuck[MAIN] != cursor.at[REQUEST] and passed < length(queues, MAIN):
        key = pop(queues, MAIN)
        if cursor.held[key] > 0:
            passed += 1
            frequency[key] = max(frequency[key] - 1, 0)
            pass_over(queues, MAIN, key)
        elif frequency[key] > 0:
            frequency[key] -= 1
            passed = 0
            append(queues, MAIN, key)
        else:
            return key
    stuck[MAIN] = cursor.at[REQUEST]
    return -1


@kernel
def _from_small(cursor: Cursor, queues: Queues, frequency: I8, stuck: I64, threshold: int) -> int:
    """Pass on to main what was touched often enough until one was not and may leave; -1 where all pass or are held."""
    key = overdue(cursor, queues, SMALL)
    if key >= 0 and frequency[key] < threshold:
        remove(queues, key)
        return key
    for _ in range(length(queues, SMALL) if stuck[SMALL] != cursor.at[REQUEST] else 0):
        if length(queues, SMALL) == 0:
            break
        key = pop(queues, SMALL)
        if frequency[key] >= threshold:
            frequency[key] = 0
            append(queues, MAIN, key)
            stuck[MAIN] = -1
        elif cursor.held[key] > 0:
            pass_over(queues, SMALL, key)
        else:
            return key
    stuck[SMALL] = cursor.at[REQUEST]
    return -1
