"""Policies whose hits move nothing: FIFO, SIEVE and S3-FIFO.

Every policy fills `hits` bool[n] for `ids` int32[n] in [0, n_ids) at a capacity in [1, n_ids]; `analytics.policies` is their front.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from analytics.policies.queues import Queues, append, kernel, length, make_queues, pop, queue_of, remember, remove

Bools = npt.NDArray[np.bool_]
I8 = npt.NDArray[np.int8]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

SMALL, MAIN, GHOST = range(3)
SMALL_SHARE, GHOST_SHARE = 0.10, 0.90
MAX_FREQUENCY, TO_MAIN = 3, 2
ABSENT, RESIDENT, VISITED = range(3)


def fifo(ids: I32, n_ids: int, capacity: int, hits: Bools) -> None:
    """First in, first out. What stands in the cache are the last `capacity` inserted, so that an id's number of insertion says it all."""
    _fifo(ids, capacity, hits, np.full(n_ids, -capacity - 1, np.int64))


@kernel
def _fifo(ids: I32, capacity: int, hits: Bools, inserted_as: I64) -> None:
    inserted = 0
    for i in range(ids.size):
        key = ids[i]
        hits[i] = inserted_as[key] >= inserted - capacity
        if not hits[i]:
            inserted_as[key] = inserted
            inserted += 1


def sieve(ids: I32, n_ids: int, capacity: int, hits: Bools) -> None:
    """SIEVE: a hand walks from the oldest to the newest, clears marks of visit and evicts the first that has none.

    The queue lies in an array as [0, kept) behind the hand and [hand, end) before it; what the hand evicts leaves no hole.
    Source: Zhang et al., NSDI 2024.
    """
    _sieve(ids, capacity, hits, np.empty(2 * capacity + 64, np.int32), np.zeros(n_ids, np.uint8))


@kernel
def _sieve(ids: I32, capacity: int, hits: Bools, queue: I32, state: U8) -> None:
    kept = hand = end = 0
    for i in range(ids.size):
        key = ids[i]
        hits[i] = state[key] != ABSENT
        if hits[i]:
            state[key] = VISITED
            continue
        if kept + end - hand == capacity:
            while state[queue[hand]] == VISITED:
                state[queue[hand]] = RESIDENT
                queue[kept] = queue[hand]
                kept, hand = kept + 1, hand + 1
                if hand == end:
                    hand, end, kept = 0, kept, 0
            state[queue[hand]] = ABSENT
            hand += 1
            if hand == end:  # the newest was evicted: the next search starts at the oldest
                hand, end, kept = 0, kept, 0
        if end == queue.size:
            end = _close_gap(queue, kept, hand, end)
            hand = kept
        queue[end] = key
        state[key] = RESIDENT
        end += 1


@kernel
def _close_gap(queue: I32, kept: int, hand: int, end: int) -> int:
    for i in range(hand, end):
        queue[kept + i - hand] = queue[i]
    return kept + end - hand


def s3fifo(ids: I32, n_ids: int, capacity: int, hits: Bools) -> None:
    """S3-FIFO as libCacheSim has it since 2024-12: small 10 %, ghost 90 % of the capacity, two more touches lead from small to main.

    Frequencies stop at 3. Until something is evicted, what finds the small queue full goes to main. Below 10 blocks the small queue
    keeps one. Source: Yang et al., SOSP 2023.
    """
    _s3fifo(ids, capacity, hits, make_queues(n_ids, capacity), np.full(n_ids, -1, np.int8))


@kernel
def _s3fifo(ids: I32, capacity: int, hits: Bools, queues: Queues, frequency: I8) -> None:
    """`frequency` of an id is -1 where it is not resident."""
    small_room, ghost_room, full = max(1, int(SMALL_SHARE * capacity)), int(GHOST_SHARE * capacity), False
    for i in range(ids.size):
        key = ids[i]
        hits[i] = frequency[key] >= 0
        if hits[i]:
            frequency[key] = min(frequency[key] + 1, MAX_FREQUENCY)
            continue
        returning = queue_of(queues, key) == GHOST
        if returning:
            remove(queues, key)
        while length(queues, SMALL) + length(queues, MAIN) == capacity:
            full = True
            if length(queues, MAIN) > capacity - small_room or length(queues, SMALL) == 0:
                _evict_main(queues, frequency)
            else:
                _evict_small(queues, frequency, ghost_room)
        to_main = returning or (not full and length(queues, SMALL) >= small_room)
        append(queues, MAIN if to_main else SMALL, key)
        frequency[key] = 0


@kernel
def _evict_main(queues: Queues, frequency: I8) -> None:
    key = pop(queues, MAIN)
    while frequency[key] > 0:
        frequency[key] -= 1
        append(queues, MAIN, key)
        key = pop(queues, MAIN)
    frequency[key] = -1


@kernel
def _evict_small(queues: Queues, frequency: I8, ghost_room: int) -> None:
    """Pass on to main what was touched often enough until one was not and leaves; it may be that all pass."""
    while length(queues, SMALL) > 0:
        key = pop(queues, SMALL)
        if frequency[key] >= TO_MAIN:
            frequency[key] = 0
            append(queues, MAIN, key)
        else:
            frequency[key] = -1
            remember(queues, GHOST, ghost_room, key)
            return
