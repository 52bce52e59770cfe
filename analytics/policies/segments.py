"""2Q and ARC in both forms: two queues of resident blocks beside ghosts. Where one queue holds nothing that may leave, the other gives."""

from __future__ import annotations

from analytics.policies.cursor import CAPACITY, HIT, INCOMING, KEY, Cursor, Trace, advance, full
from analytics.policies.lists import depart, store, take_free
from analytics.policies.queues import Queues, append, kernel, length, make_queues, pop, queue_of, remember, remove
from analytics.policies.recency import B1, B2, HOT, IN, IN_SHARE, OUT, OUT_SHARE, T1, T2


def two_q(trace: Trace, cursor: Cursor, capacity: int) -> None:
    """2Q, full version: first touches queue in a FIFO of 25 %, its last victims (50 % of the capacity, ids only) return to an LRU.

    Hits in the FIFO move nothing. Source: Johnson and Shasha, VLDB 1994.
    """
    _two_q(trace, cursor, make_queues(trace.parent.size, capacity), max(1, int(IN_SHARE * capacity)), int(OUT_SHARE * capacity))


@kernel
def _two_q(trace: Trace, cursor: Cursor, queues: Queues, in_room: int, out_room: int) -> None:
    while advance(cursor, trace):
        key = cursor.at[KEY]
        queue = queue_of(queues, key)
        if queue == IN:
            continue
        if queue >= 0:
            remove(queues, key)
        if not cursor.at[HIT]:
            while full(cursor):
                hot_first = length(queues, IN) <= in_room and length(queues, HOT) > 0
                depart(cursor, trace, queues, _take_two_q(cursor, queues, hot_first, out_room))
            store(cursor, trace, queues, IN if queue < 0 else HOT, key)
        else:
            append(queues, HOT, key)


@kernel
def _take_two_q(cursor: Cursor, queues: Queues, hot_first: bool, out_room: int) -> int:
    key = take_free(cursor, queues, HOT) if hot_first else -1
    if key < 0:
        key = take_free(cursor, queues, IN)
        if key < 0:
            return take_free(cursor, queues, HOT)
        remember(queues, OUT, out_room, key)
    return key


def arc(trace: Trace, cursor: Cursor, capacity: int) -> None:
    """ARC: recency (T1) and frequency (T2) share the capacity at a target that hits in their ghosts (B1, B2) move.

    Source: Megiddo and Modha, FAST 2003.
    """
    _arc(trace, cursor, make_queues(trace.parent.size, 2 * capacity, trace.sizes), int(cursor.at[CAPACITY]))


@kernel
def _arc(trace: Trace, cursor: Cursor, queues: Queues, capacity: int) -> None:
    target = 0.0
    while advance(cursor, trace):
        key = cursor.at[KEY]
        queue = queue_of(queues, key)
        if queue == B1:
            target = min(float(capacity), target + max(1.0, length(queues, B2) / length(queues, B1)))
        elif queue == B2:
            target = max(0.0, target - max(1.0, length(queues, B1) / length(queues, B2)))
        if not cursor.at[HIT]:
            while full(cursor):
                # A cold miss with T1 the whole cache leaves no ghost; otherwise one ghost goes first where the lists are at their bounds.
                no_ghost = queue < 0 and not _trim_ghosts(queues, capacity, cursor.at[INCOMING])
                _replace(trace, cursor, queues, target, queue == B2, no_ghost)
            if queue >= 0:
                remove(queues, key)
            store(cursor, trace, queues, T1 if queue < 0 else T2, key)
        else:
            remove(queues, key)
            append(queues, T2, key)


@kernel
def _trim_ghosts(queues: Queues, capacity: int, incoming: int) -> bool:
    """Keep to the bounds of the ghosts; false where T1 alone is at its own."""
    if length(queues, T1) + length(queues, B1) + incoming > capacity:
        if length(queues, B1) == 0:
            return False
        pop(queues, B1)
    elif length(queues, B2) > 0 and length(queues, T1) + length(queues, T2) + length(queues, B1) + length(queues, B2) >= 2 * capacity:
        pop(queues, B2)
    return True


@kernel
def _replace(trace: Trace, cursor: Cursor, queues: Queues, target: float, in_b2: bool, no_ghost: bool) -> None:
    recent = length(queues, T1)
    recent_first = no_ghost or recent > 0 and (recent > target or (in_b2 and recent == target) or length(queues, T2) == 0)
    queue = T1 if recent_first else T2
    key = take_free(cursor, queues, queue)
    if key < 0:
        queue = T2 if recent_first else T1
        key = take_free(cursor, queues, queue)
    depart(cursor, trace, queues, key)
    if not no_ghost:
        append(queues, B1 if queue == T1 else B2, key)
