"""Queues of dense ids with removal anywhere, for policies that hold several of them.

An id stands in one queue at most, and `at[id]` says which and where (`index * QUEUES + queue`, -1: nowhere). Moving an id appends it to its
new queue and overwrites `at[id]`; the old entry is thereby stale and is skipped when it comes to the front. So a move costs one random
access, where a linked list costs three, and a buffer that is full is compacted in place: O(1) a move, amortised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numba as nb
import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

QUEUES = 4
FRONT, BACK, LIVE, STUCK, OVERDUE, ENDS = range(6)

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function) -> Function:
    """Compile a function that allocates nothing: numba then leaves out its atomic counting of references to arrays, which makes
    simulators made of small functions two to three times slower."""
    compiled: Function = nb.njit(cache=True, nogil=True, _nrt=False)(function)  # type: ignore[call-overload]
    return compiled


class Queues(NamedTuple):
    """`entries` int32[QUEUES, room] · `ends` int64[QUEUES, ENDS] of FRONT, BACK, LIVE, and for `lists.front_free` STUCK and OVERDUE ·
    `at` int32[n_ids] · `passed` bool[n_ids]: went from the front to the back because it was held · `sizes` as of a `Trace`; where there are
    some, LIVE is their sum.
    """

    entries: I32
    ends: I64
    at: I32
    passed: npt.NDArray[np.bool_]
    sizes: I64 | None = None


def make_queues(n_ids: int, most_live: int, sizes: I64 | None = None) -> Queues:
    """Empty queues of which none ever holds more than `most_live` ids."""
    entries = np.empty((QUEUES, 4 * most_live + 64), np.int32)
    return Queues(entries, np.zeros((QUEUES, ENDS), np.int64), np.full(n_ids, -1, np.int32), np.zeros(n_ids, np.bool_), sizes)


@kernel
def size_of(sizes: I64 | None, key: int) -> int:
    """Size of an id, one where there are none; compiled away there."""
    return 1 if sizes is None else sizes[key]


@kernel
def length(queues: Queues, queue: int) -> int:
    """Ids that stand in a queue, or the sum of their sizes."""
    return queues.ends[queue, LIVE]


@kernel
def queue_of(queues: Queues, key: int) -> int:
    """Queue in which an id stands, -1 for none."""
    where = queues.at[key]
    return where & (QUEUES - 1) if where >= 0 else -1


@kernel
def remove(queues: Queues, key: int) -> None:
    """Take an id out of the queue in which it stands."""
    queues.ends[queues.at[key] & (QUEUES - 1), LIVE] -= size_of(queues.sizes, key)
    queues.at[key] = -1


@kernel
def append(queues: Queues, queue: int, key: int) -> None:
    """Put an id that stands in no queue at the back of one."""
    ends = queues.ends
    if ends[queue, BACK] == queues.entries.shape[1]:
        _compact(queues, queue)
    back = ends[queue, BACK]
    queues.entries[queue, back] = key
    queues.at[key] = back * QUEUES + queue
    ends[queue, BACK] = back + 1
    ends[queue, LIVE] += size_of(queues.sizes, key)
    ends[queue, STUCK] = 0
    queues.passed[key] = False


@kernel
def pop(queues: Queues, queue: int) -> int:
    """Take out and return the id at the front of a queue that is not empty."""
    ends = queues.ends
    front = ends[queue, FRONT]
    while queues.at[queues.entries[queue, front]] != front * QUEUES + queue:
        front += 1
    key = queues.entries[queue, front]
    ends[queue, FRONT] = front + 1
    ends[queue, LIVE] -= size_of(queues.sizes, key)
    queues.at[key] = -1
    return key


@kernel
def remember(queues: Queues, ghost: int, room: int, key: int) -> None:
    """Append an id to a queue of at most `room` ids, whose oldest goes when it is full."""
    if room > 0:
        if length(queues, ghost) == room:
            pop(queues, ghost)
        append(queues, ghost, key)


@kernel
def _compact(queues: Queues, queue: int) -> None:
    entries, ends, back = queues.entries, queues.ends, 0
    for i in range(ends[queue, FRONT], ends[queue, BACK]):
        key = entries[queue, i]
        entries[queue, back] = key
        if queues.at[key] == i * QUEUES + queue:
            queues.at[key] = back * QUEUES + queue
            back += 1
    ends[queue, FRONT], ends[queue, BACK] = 0, back


@kernel
def front(queues: Queues, queue: int) -> int:
    """The id at the front of a queue that is not empty; it stays."""
    ends = queues.ends
    while queues.at[queues.entries[queue, ends[queue, FRONT]]] != ends[queue, FRONT] * QUEUES + queue:
        ends[queue, FRONT] += 1
    return queues.entries[queue, ends[queue, FRONT]]
