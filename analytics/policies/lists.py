"""Recency and insertion order in both forms: LRU and FIFO, the shortest examples of a policy on a `Cursor`."""

from __future__ import annotations

from analytics.policies.cursor import FORM, HIT, KEY, PREFIX, REQUEST, Cursor, Trace, advance, enter, full, leave
from analytics.policies.free import freed_parent
from analytics.policies.queues import OVERDUE, STUCK, Queues, append, front, kernel, length, make_queues, pop, queue_of, remove


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
def front_free(cursor: Cursor, queues: Queues, queue: int) -> int:
    """The first id of a queue that is not held, -1 where there is none; it stays, held ones before it are passed over to the back.

    What was passed over goes first once its last child left (`depart`, in place of `leave`): its turn had come, and a chain that leaves
    from the leaf up would otherwise cost a round of the queue a block. A queue that was found to be all held is not searched again for
    this request until a block comes into it other than the one that is entered (`store`), or is freed there.
    """
    key = overdue(cursor, queues, queue)
    if key >= 0 or queues.ends[queue, STUCK] == cursor.at[REQUEST] + 1:
        return key
    for _ in range(length(queues, queue)):
        key = front(queues, queue)
        if cursor.held[key] == 0:
            return key
        pass_over(queues, queue, pop(queues, queue))
    queues.ends[queue, STUCK] = cursor.at[REQUEST] + 1
    return -1


@kernel
def overdue(cursor: Cursor, queues: Queues, queue: int) -> int:
    """The block of a queue that was passed over and then freed last, -1 for none."""
    key = queues.ends[queue, OVERDUE] - 1
    if key >= 0 and (queue_of(queues, key) != queue or cursor.held[key] > 0 or not queues.passed[key]):
        queues.ends[queue, OVERDUE] = 0
        return -1
    return key


@kernel
def pass_over(queues: Queues, queue: int, key: int) -> None:
    """Append a held block whose turn had come."""
    append(queues, queue, key)
    queues.passed[key] = True


@kernel
def store(cursor: Cursor, trace: Trace, queues: Queues, queue: int, key: int) -> None:
    """Enter a block and append it."""
    stuck = queues.ends[queue, STUCK] if cursor.at[FORM] == PREFIX else 0
    enter(cursor, trace, key)
    append(queues, queue, key)
    queues.ends[queue, STUCK] = stuck


@kernel
def depart(cursor: Cursor, trace: Trace, queues: Queues, key: int) -> None:
    """Book a block out that stands in no queue any more; the queue of the parent that it frees may be searched again."""
    leave(cursor, trace, key)
    parent = freed_parent(cursor, trace, key)
    if parent >= 0 and queue_of(queues, parent) >= 0:
        queues.ends[queue_of(queues, parent), STUCK] = 0
        if queues.passed[parent]:
            queues.ends[queue_of(queues, parent), OVERDUE] = parent + 1


@kernel
def take_free(cursor: Cursor, queues: Queues, queue: int) -> int:
    """Take out the first id of a queue that is not held, -1 where there is none; held ones before it go to the back."""
    key = front_free(cursor, queues, queue)
    if key >= 0:
        remove(queues, key)
    return key
