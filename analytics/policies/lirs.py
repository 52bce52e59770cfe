"""LIRS in both forms: a stack tells blocks of low inter-reference recency (LIR) from others (HIR), which queue to leave."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from analytics.policies.cursor import CAPACITY, FORM, HIT, INCOMING, KEY, PLAIN, Cursor, Trace, advance, enter, full
from analytics.policies.lists import depart, take_free
from analytics.policies.queues import Queues, append, front, kernel, length, make_queues, pop, queue_of, remove, size_of

Bools = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]

STACK = 0
RESIDENT_HIR, GHOST = range(2)
HIR_SHARE, STACK_OVER_CAPACITY = 0.01, 2
LIR_ROOM, HIR_ROOM, LIRS, EVICTIONS = range(4)


def lirs(trace: Trace, cursor: Cursor, capacity: int) -> None:
    """LIRS: 1 % of the cache for blocks seen once or rarely; a block asked for again while it stands in the stack becomes LIR.

    The stack is cut at twice the capacity, oldest ghosts first. As in libCacheSim, and other than in the paper, a hit on an HIR block that
    left the stack demotes an LIR block too where their share is full (plain form only, and once something was evicted): the next new block
    becomes LIR.
    In the prefix form, where no HIR block may leave, LIR blocks are demoted until one may. With sizes, what is larger than the queue is not
    stored, and what comes into the queue drives others out until it fits, as in libCacheSim.
    Source: Jiang and Zhang, SIGMETRICS 2002.
    """
    n_ids, total = trace.parent.size, int(cursor.at[CAPACITY])
    hir_room, most = max(1, int(HIR_SHARE * total)), STACK_OVER_CAPACITY * capacity + 1
    stack, others = make_queues(n_ids, most, trace.sizes), make_queues(n_ids, most, trace.sizes)
    rooms = np.array([total - hir_room, hir_room, 0, 0], np.int64)
    _lirs(trace, cursor, stack, others, np.zeros(n_ids, np.bool_), rooms, STACK_OVER_CAPACITY * total)


@kernel
def _lirs(trace: Trace, cursor: Cursor, stack: Queues, others: Queues, is_lir: Bools, rooms: I64, most: int) -> None:
    """`others` holds resident HIR blocks and ghosts, in the order in which they came there."""
    while advance(cursor, trace):
        key = cursor.at[KEY]
        in_stack = stack.at[key] >= 0
        if in_stack:
            remove(stack, key)
            append(stack, STACK, key)
        if cursor.at[HIT]:
            _hit(trace, cursor, stack, others, is_lir, rooms, key, in_stack)
        elif trace.sizes is not None:
            _store_sized(trace, cursor, stack, others, is_lir, rooms, key, in_stack)
        else:
            while full(cursor):
                _evict(trace, cursor, stack, others, is_lir, rooms)
                rooms[EVICTIONS] += 1
            enter(cursor, trace, key)
            if in_stack and stack.at[key] >= 0:
                remove(others, key)
                _make_lir(trace, cursor, stack, others, is_lir, rooms, key)
            else:
                append(stack, STACK, key)
                if rooms[LIRS] < rooms[LIR_ROOM]:
                    is_lir[key] = True
                    rooms[LIRS] += 1
                else:
                    append(others, RESIDENT_HIR, key)
        while length(stack, STACK) > most and length(others, GHOST) > 0:
            remove(stack, pop(others, GHOST))


@kernel
def _store_sized(trace: Trace, cursor: Cursor, stack: Queues, others: Queues, is_lir: Bools, rooms: I64, key: int, in_stack: bool) -> None:
    size = cursor.at[INCOMING]
    if in_stack:
        remove(others, key)
        _make_lir(trace, cursor, stack, others, is_lir, rooms, key)
    elif size > min(rooms[LIR_ROOM], rooms[HIR_ROOM]):
        return
    elif rooms[LIRS] + size <= rooms[LIR_ROOM]:
        append(stack, STACK, key)
        is_lir[key] = True
        rooms[LIRS] += size
    else:
        _queue_sized(trace, cursor, stack, others, rooms, key)
        append(stack, STACK, key)
    enter(cursor, trace, key)


@kernel
def _queue_sized(trace: Trace, cursor: Cursor, stack: Queues, others: Queues, rooms: I64, key: int) -> None:
    while length(others, RESIDENT_HIR) + size_of(trace.sizes, key) > rooms[HIR_ROOM]:
        _drive_out(trace, cursor, stack, others, pop(others, RESIDENT_HIR))
    append(others, RESIDENT_HIR, key)


@kernel
def _hit(trace: Trace, cursor: Cursor, stack: Queues, others: Queues, is_lir: Bools, rooms: I64, key: int, in_stack: bool) -> None:
    if is_lir[key]:
        _prune(stack, others, is_lir)
        return
    remove(others, key)
    if in_stack:
        _make_lir(trace, cursor, stack, others, is_lir, rooms, key)
        return
    append(others, RESIDENT_HIR, key)
    while trace.sizes is not None and rooms[LIRS] + cursor.at[INCOMING] > rooms[LIR_ROOM]:
        _demote(trace, cursor, stack, others, is_lir, rooms)
    if trace.sizes is None and rooms[EVICTIONS] > 0 and cursor.at[FORM] == PLAIN and rooms[LIRS] >= rooms[LIR_ROOM] and rooms[LIRS] > 0:
        if length(others, RESIDENT_HIR) >= rooms[HIR_ROOM]:
            _evict(trace, cursor, stack, others, is_lir, rooms)
        _demote(trace, cursor, stack, others, is_lir, rooms)
    append(stack, STACK, key)
    if not cursor.resident[key]:  # its own demotion drove it out of a queue of one
        append(others, GHOST, key)


@kernel
def _make_lir(trace: Trace, cursor: Cursor, stack: Queues, others: Queues, is_lir: Bools, rooms: I64, key: int) -> None:
    """Of a block at the top of the stack and in no queue; the LIR block at the bottom goes to the queue where there is no room for both."""
    if rooms[LIR_ROOM] == 0:
        append(others, RESIDENT_HIR, key)
        return
    while rooms[LIRS] + size_of(trace.sizes, key) > rooms[LIR_ROOM]:
        _demote(trace, cursor, stack, others, is_lir, rooms)
    is_lir[key] = True
    rooms[LIRS] += size_of(trace.sizes, key)


@kernel
def _demote(trace: Trace, cursor: Cursor, stack: Queues, others: Queues, is_lir: Bools, rooms: I64) -> None:
    """Take the LIR block at the bottom of the stack, or nearest to it, out of the stack into the queue."""
    while not is_lir[front(stack, STACK)]:
        _drop_bottom(stack, others)
    key = pop(stack, STACK)
    is_lir[key] = False
    rooms[LIRS] -= size_of(trace.sizes, key)
    if trace.sizes is not None:
        _queue_sized(trace, cursor, stack, others, rooms, key)
    else:
        append(others, RESIDENT_HIR, key)
    _prune(stack, others, is_lir)


@kernel
def _prune(stack: Queues, others: Queues, is_lir: Bools) -> None:
    """Take blocks that are not LIR off the bottom, but never the last."""
    while length(stack, STACK) > 1 and not is_lir[front(stack, STACK)]:
        if length(stack, STACK) == size_of(stack.sizes, front(stack, STACK)):
            return
        _drop_bottom(stack, others)


@kernel
def _drop_bottom(stack: Queues, others: Queues) -> None:
    key = pop(stack, STACK)
    if queue_of(others, key) == GHOST:
        remove(others, key)


@kernel
def _evict(trace: Trace, cursor: Cursor, stack: Queues, others: Queues, is_lir: Bools, rooms: I64) -> None:
    key = take_free(cursor, others, RESIDENT_HIR)
    while key < 0:
        _demote(trace, cursor, stack, others, is_lir, rooms)
        key = take_free(cursor, others, RESIDENT_HIR)
    _drive_out(trace, cursor, stack, others, key)


@kernel
def _drive_out(trace: Trace, cursor: Cursor, stack: Queues, others: Queues, key: int) -> None:
    depart(cursor, trace, others, key)
    if stack.at[key] >= 0:
        append(others, GHOST, key)
