"""Policies that order by how often a block was used, in both forms: LFU, LFUDA and GDSF, one heap."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from analytics.policies.cursor import CLOCK, FORM, HIT, KEY, PLAIN, REQUEST, Cursor, Trace, advance, enter, full, leave
from analytics.policies.free import Heap, discard, freed_by_turn, freed_parent, least_free, make_heap, push
from analytics.policies.queues import kernel, size_of

I32 = npt.NDArray[np.int32]


def lfuda(trace: Trace, cursor: Cursor, capacity: int) -> None:
    """LFU with dynamic aging as libCacheSim has it: a block starts one above the least value there is, and a hit adds that least value.

    Source: Arlitt et al., ACM SIGMETRICS PER 27(4), 2000, where a hit adds one to the uses and starts again from the last victim's value
    (that is `gdsf` at equal costs).
    """
    n_ids = trace.parent.size
    _by_count(trace, cursor, make_heap(n_ids, capacity), True)


def lfu(trace: Trace, cursor: Cursor, capacity: int) -> None:
    """Least frequently used while resident; among equals the one that has stood longest at its count."""
    _by_count(trace, cursor, make_heap(trace.parent.size, capacity), False)


def gdsf(trace: Trace, cursor: Cursor, capacity: int, per_position: float = 0.0) -> None:
    """Greedy dual size frequency: uses times cost over size, on top of the last victim's value at the block's last use.

    `per_position` is what a block's prefill costs more than that of the block before it, relative to the head's
    (cost = 1 + per_position * position): 0 counts blocks, b/a * block_size prefill seconds. With sizes values are millionths, as
    libCacheSim has them: what rounds to a tie differs by the unit. Source: Cherkasova, HPL-98-69R1, 1998.
    """
    n_ids = trace.parent.size
    unit = 1.0 if trace.sizes is None else 1e6
    _gdsf(trace, cursor, make_heap(n_ids, capacity), np.zeros(n_ids, np.int32), per_position, unit)


@kernel
def _by_count(trace: Trace, cursor: Cursor, heap: Heap, aging: bool) -> None:
    least, before = 0.0, -1
    while advance(cursor, trace):
        key = cursor.at[KEY]
        push(heap, freed_by_turn(cursor, trace, before))
        before = cursor.at[REQUEST]
        if cursor.at[HIT]:
            was = heap.priority[key]
            _value(cursor, heap, key, was + (least if aging else 1.0))
            if was == least and heap.size[0] > 0:
                least = max(least, heap.priority[heap.keys[0]])
            continue
        while full(cursor):
            least = heap.priority[_evict_least(cursor, trace, heap)]
            if heap.size[0] > 0:
                least = max(least, heap.priority[heap.keys[0]])
        enter(cursor, trace, key)
        _value(cursor, heap, key, 1.0 + (least if aging else 0.0))


@kernel
def _gdsf(trace: Trace, cursor: Cursor, heap: Heap, uses: I32, per_position: float, unit: float) -> None:
    inflation, before = 0.0, -1
    while advance(cursor, trace):
        key = cursor.at[KEY]
        push(heap, freed_by_turn(cursor, trace, before))
        before = cursor.at[REQUEST]
        if not cursor.at[HIT]:
            while full(cursor):
                inflation = heap.priority[_evict_least(cursor, trace, heap)]
            enter(cursor, trace, key)
            uses[key] = 0
        uses[key] += 1
        _value(cursor, heap, key, inflation + uses[key] * unit * (1.0 + per_position * trace.depth[key]) / size_of(trace.sizes, key))


@kernel
def _value(cursor: Cursor, heap: Heap, key: int, value: float) -> None:
    """Give a block its value. What is held stays outside until it is freed."""
    heap.priority[key], heap.tie[key] = value, cursor.at[CLOCK]
    if cursor.at[FORM] == PLAIN or heap.where[key] >= 0:
        push(heap, key)


@kernel
def _evict_least(cursor: Cursor, trace: Trace, heap: Heap) -> int:
    victim = least_free(cursor, heap)
    discard(heap, victim)
    leave(cursor, trace, victim)
    push(heap, freed_parent(cursor, trace, victim))
    return victim
