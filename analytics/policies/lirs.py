"""LIRS in both forms: a stack tells blocks of low inter-reference recency (LIR) from others (HIR), which queue to leave."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from analytics.policies.cursor import FORM, HIT, KEY, PLAIN, Cursor, Trace, advance, enter, full
from analytics.policies.lists import depart, take_free
from analytics.policies.queues import Queues, append, front, kernel, length, make_queues, pop, queue_of, remove

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
    In the prefix form, where no HIR block may leave, LIR blocks are demoted until one may.
    Source: Jiang and Zhang, SIGMETRICS 2002.
    """
    n_ids, hir_room = trace.parent.size, max(1, int(HIR_SHARE * capacity))
    stack, others = make_queues(n_ids, STACK_OVER_CAPACITY * capacity + 1), make_queues(n_ids, STACK_OVER_CAPACITY * capacity + 1)
    rooms = np.array([capacity - hir_room, hir_room, 0, 0], np.int64)
    _lirs(trace, cursor, stack, others, np.zeros(n_ids, np.bool_), rooms, STACK_OVER_CAPACITY * capacity)


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
def _hit(trace: Trace, cursor: Cursor, stack: Queues, others: Queues, is_lir: Bools, rooms: I64, key: int, in_stack: bool) -> None:
    if is_lir[key]:
        _prune(stack, others, is_lir)
        return
    remove(others, key)
    if in_stack:
        _make_lir(trace, cursor, stack, others, is_lir, rooms, key)
        return
    append(others, RESIDENT_HIR, key)
    if rooms[EVICTIONS] > 0 and cursor.at[FORM] == PLAIN and rooms[LIRS] >= rooms[LIR_ROOM] and rooms[LIRS] > 0:
        if length(others, RESIDENT_HIR) >= rooms[HIR_ROOM]:
            _evict(trace, cursor, stack, others, is_lir, rooms)
        _demote(stack, others, is_lir, rooms)
    append(stack, STACK, key)
    if not cursor.resident[key]:  # its own demotion drove it out of a queue of one
        append(others, GHOST, key)


@kernel
def _make_lir(trace: Trace, cursor: Cursor, stack: Queues, others: Queues, is_lir: Bools, rooms: I64, key: int) -> None:
    """Of a block at the top of the stack and in no queue; the LIR block at the bottom goes to the queue where there is no room for both."""
    if rooms[LIR_ROOM] == 0:
        append(others, RESIDENT_HIR, key)
        return
    if rooms[LIRS] >= rooms[LIR_ROOM]:
        _demote(stack, others, is_lir, rooms)
    is_lir[key] = True
    rooms[LIRS] += 1


@kernel
def _demote(stack: Queues, others: Queues, is_lir: Bools, rooms: I64) -> None:
    """Take the LIR block at the bottom of the stack, or nearest to it, out of the stack into the queue."""
    while not is_lir[front(stack, STACK)]:
        _drop_bottom(stack, others)
    key = pop(stack, STACK)
    is_lir[key] = False
    rooms[LIRS] -= 1
    append(others, RESIDENT_HIR, key)
    _prune(stack, others, is_lir)


@kernel
def _prune(stack: Queues, others: Queues, is_lir: Bools) -> None:
    """Take blocks that are not LIR off the bottom, but never the last."""
    while length(stack, STACK) > 1 and not is_lir[front(stack, STACK)]:
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
        _demote(stack, others, is_lir, rooms)
        key = take_free(cursor, others, RESIDENT_HIR)
    depart(cursor, trace, others, key)
    if stack.at[key] >= 0:
        append(others, GHOST, key)
