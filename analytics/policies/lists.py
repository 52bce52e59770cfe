"""Recency and insertion order in both forms: LRU and FIFO, the shortest examples of a policy on a `Cursor`."""

from __future__ import annotations

from analytics.policies.cursor import HIT, KEY, Cursor, Trace, advance, enter, full, leave
from analytics.policies.queues import Queues, append, kernel, length, make_queues, pop, remove


def lru(trace: Trace, cursor: Cursor, capacity: int) -> None:
    """Least recently used. Prefix-safe it is leaf-first LRU, as vLLM frees blocks and as `run_exact` measures distances."""
    _in_order(trace, cursor, make_queues(trace.parent.size, capacity), True)


def fifo(trace: Trace, cursor: Cursor, capacity: int) -> None:
    """First in, first out; a held block that comes to the front goes to the back."""
    _in_order(trace, cursor, make_queues(trace.parent.size, capacity), False)


@kernel
def _in_order(trace: Trace, cursor: Cursor, queues: Queues, promote: bool) -> None:
    while advance(cursor, trace):
        key = cursor.at[KEY]
        if cursor.at[HIT]:
            if promote:
                remove(queues, key)
                append(queues, 0, key)
            continue
        while full(cursor):
            leave(cursor, trace, pop_free(cursor, queues, 0))
        enter(cursor, trace, key)
        append(queues, 0, key)


@kernel
def pop_free(cursor: Cursor, queues: Queues, queue: int) -> int:
    """Take out the first id of a queue that is not held; held ones before it go to the back. There must be one."""
    key = pop(queues, queue)
    while cursor.held[key] > 0:
        append(queues, queue, key)
        key = pop(queues, queue)
    return key


@kernel
def take_free(cursor: Cursor, queues: Queues, queue: int) -> int:
    """Take out the first id of a queue that is not held, -1 where there is none; held ones before it go to the back."""
    for _ in range(length(queues, queue)):
        key = pop(queues, queue)
        if cursor.held[key] == 0:
            return key
        append(queues, queue, key)
    return -1
