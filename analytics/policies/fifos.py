"""Policies whose hits move nothing: FIFO, SIEVE and S3-FIFO.

Every kernel fills `hits` bool[n] for `ids` int32[n] in [0, n_ids) at a capacity in [1, n_ids]; `analytics.policies` is their front.
"""

from __future__ import annotations

import numba as nb
import numpy as np
import numpy.typing as npt

from analytics.policies.queues import append, length, make_queues, pop, queue_of, remove

Bools = npt.NDArray[np.bool_]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

SMALL, MAIN, GHOST = range(3)
SMALL_SHARE, GHOST_SHARE = 0.10, 0.90
MAX_FREQUENCY = 3


@nb.njit(cache=True, nogil=True)
def fifo_kernel(ids: I32, n_ids: int, capacity: int, hits: Bools) -> None:
    """First in, first out. What stands in the cache are the last `capacity` inserted, so that an id's number of insertion says it all."""
    inserted_as, inserted = np.full(n_ids, -capacity - 1, np.int64), 0
    for i in range(ids.size):
        key = ids[i]
        hits[i] = inserted_as[key] >= inserted - capacity
        if not hits[i]:
            inserted_as[key] = inserted
            inserted += 1


@nb.njit(cache=True, nogil=True)
def sieve_kernel(ids: I32, n_ids: int, capacity: int, hits: Bools) -> None:
    """SIEVE (NSDI 2024): a hand walks from the oldest to the newest, clears marks of visit and evicts the first that has none.

    The queue lies in `queue` as [0, kept) behind the hand and [hand, end) before it; what the hand evicts leaves no hole.
    """
    queue = np.empty(2 * capacity + 64, np.int32)
    state = np.zeros(n_ids, np.uint8)  # 0 absent, 1 resident, 2 visited
    kept = hand = end = 0
    for i in range(ids.size):
        key = ids[i]
        hits[i] = state[key] > 0
        if hits[i]:
            state[key] = 2
            continue
        if kept + end - hand == capacity:
            while state[queue[hand]] == 2:
                state[queue[hand]] = 1
                queue[kept] = queue[hand]
                kept, hand = kept + 1, hand + 1
                if hand == end:
                    hand, end, kept = 0, kept, 0
            state[queue[hand]] = 0
            hand += 1
            if hand == end:  # the newest was evicted: the next search starts at the oldest
                hand, end, kept = 0, kept, 0
        if end == queue.size:
            queue[kept : kept + end - hand] = queue[hand:end].copy()
            hand, end = kept, kept + end - hand
        queue[end] = key
        state[key] = 1
        end += 1


@nb.njit(cache=True, nogil=True)
def s3fifo_kernel(ids: I32, n_ids: int, capacity: int, hits: Bools) -> None:
    """S3-FIFO as libCacheSim has it since 2024-12: small 10 %, ghost 90 % of the capacity, two more touches lead from small to main.

    Frequencies stop at 3. Until something is evicted, what finds the small queue full goes to main. Source: Yang et al., SOSP 2023.
    """
    small_room, ghost_room = max(1, int(SMALL_SHARE * capacity)), int(GHOST_SHARE * capacity)
    queues = make_queues(n_ids, capacity)
    frequency = np.full(n_ids, -1, np.int8)  # -1: not resident
    full = False
    for i in range(ids.size):
        key = ids[i]
        hits[i] = frequency[key] >= 0
        if hits[i]:
            frequency[key] = min(frequency[key] + 1, MAX_FREQUENCY)
            continue
        returning = queue_of(queues, key) == GHOST
        if returning:
            remove(queues, key)
        while length(queues, SMALL) + length(queues, MAIN) >= capacity:
            full = True
            if length(queues, MAIN) > capacity - small_room or length(queues, SMALL) == 0:
                _evict_main(queues, frequency)
            else:
                _evict_small(queues, frequency, ghost_room)
        to_main = returning or (not full and length(queues, SMALL) >= small_room)
        append(queues, MAIN if to_main else SMALL, key)
        frequency[key] = 0


@nb.njit(cache=True, nogil=True)
def _evict_main(queues, frequency):  # type: ignore[no-untyped-def]
    while True:
        key = pop(queues, MAIN)
        if frequency[key] == 0:
            frequency[key] = -1
            return
        frequency[key] -= 1
        append(queues, MAIN, key)


@nb.njit(cache=True, nogil=True)
def _evict_small(queues, frequency, ghost_room):  # type: ignore[no-untyped-def]
    """Pass on to main until one leaves; it may be that all pass."""
    while length(queues, SMALL) > 0:
        key = pop(queues, SMALL)
        if frequency[key] >= 2:
            frequency[key] = 0
            append(queues, MAIN, key)
            continue
        frequency[key] = -1
        if ghost_room > 0:
            if length(queues, GHOST) >= ghost_room:
                pop(queues, GHOST)
            append(queues, GHOST, key)
        return
