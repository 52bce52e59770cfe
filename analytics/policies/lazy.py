"""Policies that promote late or not at all, in both forms: SIEVE, Clock, Delay-LRU, D-FR and AGE."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from analytics.policies.cursor import CLOCK, HIT, KEY, Cursor, Trace, advance, enter, full, leave
from analytics.policies.fifos import ABSENT, RESIDENT, VISITED
from analytics.policies.queues import Queues, append, kernel, length, make_queues, pop, remove

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

DELAY_LRU, D_FR, AGE, CLOCK_BIT = range(4)
MAX_COUNT = 3  # two bits


def sieve(trace: Trace, cursor: Cursor, capacity: int) -> None:
    """SIEVE: a hand walks from the oldest to the newest, clears marks of visit and evicts the first that has none and is not held.

    The queue lies in an array as [0, kept) behind the hand and [hand, end) before it. Source: Zhang et al., NSDI 2024.
    """
    _sieve(trace, cursor, np.empty(2 * capacity + 64, np.int32), np.zeros(trace.parent.size, np.uint8))


@kernel
def _sieve(trace: Trace, cursor: Cursor, queue: I32, state: U8) -> None:
    kept = hand = end = 0
    while advance(cursor, trace):
        key = cursor.at[KEY]
        if cursor.at[HIT]:
            state[key] = VISITED
            continue
        while full(cursor):
            victim = queue[hand]
            if cursor.held[victim] > 0 or state[victim] == VISITED:
                if cursor.held[victim] == 0:
                    state[victim] = RESIDENT
                queue[kept] = victim
                kept += 1
            else:
                state[victim] = ABSENT
                leave(cursor, trace, victim)
            hand += 1
            if hand == end:  # past the newest the search goes on at the oldest
                hand, end, kept = 0, kept, 0
        if end == queue.size:
            for i in range(hand, end):
                queue[kept + i - hand] = queue[i]
            hand, end = kept, kept + end - hand
        queue[end] = key
        state[key] = RESIDENT
        end += 1
        enter(cursor, trace, key)


def clock(trace: Trace, cursor: Cursor, capacity: int) -> None:
    """Clock, or FIFO-reinsertion with one bit: a block hit since it was last at the front goes to the back once.

    Source: Corbato, MIT Project MAC, 1968.
    """
    _lazy(trace, cursor, make_queues(trace.parent.size, capacity), *_marks(trace), CLOCK_BIT, 0.0)


def delay_lru(trace: Trace, cursor: Cursor, capacity: int, delay: float = 0.1) -> None:
    """LRU in which a hit promotes only if more than `delay` times the capacity was inserted since the block's last promotion.

    Source: the lazy promotion study, PVLDB 19(4), 2025.
    """
    _lazy(trace, cursor, make_queues(trace.parent.size, capacity), *_marks(trace), DELAY_LRU, delay * capacity)


def d_fr(trace: Trace, cursor: Cursor, capacity: int, delay: float = 0.05) -> None:
    """FIFO-reinsertion whose two-bit counter rises on a hit only if more than `delay` times the capacity was inserted since it last rose.

    The front of the queue leaves at count 0, else it goes to the back with one less. Source: as `delay_lru`.
    """
    _lazy(trace, cursor, make_queues(trace.parent.size, capacity), *_marks(trace), D_FR, delay * capacity)


def age(trace: Trace, cursor: Cursor, capacity: int, scaler: float = 0.5) -> None:
    """FIFO with one bit: a block hit since it was last seen at the front stays if its last hit is young, and is looked at once an eviction.

    Young is less than `scaler` * capacity / miss ratio accesses ago, with the miss ratio of all accesses so far. Source: as `delay_lru`.
    """
    _lazy(trace, cursor, make_queues(trace.parent.size, capacity), *_marks(trace), AGE, scaler * capacity)


def _marks(trace: Trace) -> tuple[I32, I64]:
    return np.zeros(trace.parent.size, np.int32), np.zeros(trace.parent.size, np.int64)


@kernel
def _lazy(trace: Trace, cursor: Cursor, queues: Queues, count: I32, mark: I64, rule: int, delay: float) -> None:
    """`mark` is the number of insertions at which a block was inserted, promoted or counted (AGE: the clock of its last hit)."""
    inserted = 0
    while advance(cursor, trace):
        key = cursor.at[KEY]
        if not cursor.at[HIT]:
            while full(cursor):
                young = delay * cursor.at[CLOCK] / (inserted + 1)
                leave(cursor, trace, _oldest(cursor, queues, count, mark, rule, young))
            enter(cursor, trace, key)
            append(queues, 0, key)
            inserted += 1
            count[key], mark[key] = 0, cursor.at[CLOCK] if rule == AGE else inserted
        elif rule == AGE:
            count[key], mark[key] = 1, cursor.at[CLOCK]
        elif rule == CLOCK_BIT:
            count[key] = 1
        elif inserted - mark[key] > delay:
            mark[key] = inserted
            if rule == D_FR:
                count[key] = min(count[key] + 1, MAX_COUNT)
            else:
                remove(queues, key)
                append(queues, 0, key)


@kernel
def _oldest(cursor: Cursor, queues: Queues, count: I32, mark: I64, rule: int, young: float) -> int:
    """Take out the first that is neither held nor entitled to go to the back. AGE grants that once a block and eviction."""
    left = length(queues, 0)
    while True:
        key = pop(queues, 0)
        left -= 1
        if cursor.held[key] == 0:
            if count[key] == 0:
                return key
            if rule == AGE and (left < 0 or cursor.at[CLOCK] - mark[key] >= young):
                return key
            count[key] -= 1
        append(queues, 0, key)
