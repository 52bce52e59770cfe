"""Policies that order by recency: LRU, 2Q and ARC. Arguments as in `analytics.policies.fifos`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from analytics.policies.queues import Queues, append, kernel, length, make_queues, pop, queue_of, remember, remove

Bools = npt.NDArray[np.bool_]
I32 = npt.NDArray[np.int32]

IN, HOT, OUT = range(3)
IN_SHARE, OUT_SHARE = 0.25, 0.50
T1, T2, B1, B2 = range(4)


def lru(ids: I32, n_ids: int, capacity: int, hits: Bools) -> None:
    """Least recently used. The trace itself is the queue: resident are the distinct ids of its stretch from `oldest` on."""
    _lru(ids, capacity, hits, np.full(n_ids, -1, np.int32))


@kernel
def _lru(ids: I32, capacity: int, hits: Bools, last: I32) -> None:
    oldest = resident = 0
    for i in range(ids.size):
        key = ids[i]
        hits[i] = last[key] >= oldest
        last[key] = i
        if not hits[i]:
            resident += 1
            if resident > capacity:
                while last[ids[oldest]] != oldest:
                    oldest += 1
                oldest += 1
                resident -= 1


def two_q(ids: I32, n_ids: int, capacity: int, hits: Bools) -> None:
    """2Q, full version: first touches queue in a FIFO of 25 %, its last victims (50 % of the capacity, ids only) return to an LRU.

    Hits in the FIFO move nothing. Source: Johnson and Shasha, VLDB 1994.
    """
    _two_q(ids, capacity, hits, make_queues(n_ids, capacity))


@kernel
def _two_q(ids: I32, capacity: int, hits: Bools, queues: Queues) -> None:
    in_room, out_room = max(1, int(IN_SHARE * capacity)), int(OUT_SHARE * capacity)
    for i in range(ids.size):
        key = ids[i]
        queue = queue_of(queues, key)
        hits[i] = queue == IN or queue == HOT  # noqa: SIM109 (a tuple is slow in numba)
        if queue == IN:
            continue
        if queue >= 0:
            remove(queues, key)
        if not hits[i] and length(queues, IN) + length(queues, HOT) == capacity:
            _evict_two_q(queues, in_room, out_room)
        append(queues, IN if queue < 0 else HOT, key)


@kernel
def _evict_two_q(queues: Queues, in_room: int, out_room: int) -> None:
    if length(queues, IN) <= in_room and length(queues, HOT) > 0:
        pop(queues, HOT)
    else:
        remember(queues, OUT, out_room, pop(queues, IN))


def arc(ids: I32, n_ids: int, capacity: int, hits: Bools) -> None:
    """ARC: recency (T1) and frequency (T2) share the capacity at a target that hits in their ghosts (B1, B2) move.

    Source: Megiddo and Modha, FAST 2003.
    """
    _arc(ids, capacity, hits, make_queues(n_ids, 2 * capacity))


@kernel
def _arc(ids: I32, capacity: int, hits: Bools, queues: Queues) -> None:
    target = 0.0
    for i in range(ids.size):
        key = ids[i]
        queue = queue_of(queues, key)
        hits[i] = queue == T1 or queue == T2  # noqa: SIM109 (a tuple is slow in numba)
        if queue == B1:
            target = min(float(capacity), target + max(1.0, length(queues, B2) / length(queues, B1)))
        elif queue == B2:
            target = max(0.0, target - max(1.0, length(queues, B1) / length(queues, B2)))
        if queue < 0:
            _make_room(queues, capacity, target)
        else:
            if queue >= B1:
                _replace(queues, target, queue == B2)
            remove(queues, key)
        append(queues, T1 if queue < 0 else T2, key)


@kernel
def _make_room(queues: Queues, capacity: int, target: float) -> None:
    recent = length(queues, T1) + length(queues, B1)
    total = recent + length(queues, T2) + length(queues, B2)
    if recent == capacity:
        if length(queues, T1) == capacity:
            pop(queues, T1)
        else:
            pop(queues, B1)
            _replace(queues, target, False)
    elif total >= capacity:
        if total == 2 * capacity:
            pop(queues, B2)
        _replace(queues, target, False)


@kernel
def _replace(queues: Queues, target: float, in_b2: bool) -> None:
    recent = length(queues, T1)
    if recent > 0 and (recent > target or (in_b2 and recent == target) or length(queues, T2) == 0):
        append(queues, B1, pop(queues, T1))
    else:
        append(queues, B2, pop(queues, T2))
