"""Several heaps of one set of blocks, of which only the heads are compared: for policies that tell blocks by group and recency.

A group's blocks stand in order of the request that touched them last, and of one request the deepest first. A policy gives every block it
touches a group (`tag`), and when one must leave it compares the head of each group. In the prefix form a heap holds what is free to leave
and nothing else (`free` says when that changes), so that a head is the least recent block of its group that may go.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from analytics.policies.cursor import FORM, PLAIN, REQUEST, Cursor, Trace, leave
from analytics.policies.free import Heap, discard, freed_by_turn, freed_parent, push
from analytics.policies.queues import kernel

F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


class Heads(NamedTuple):
    """`keys` int32[groups, room], `size` int64[groups], and of each id `where`, `group` int32, `priority` float64, `tie` int64."""

    keys: I32
    where: I32
    size: I64
    priority: F64
    tie: I64
    group: I32


def make_heads(n_ids: int, capacity: int, groups: int) -> Heads:
    """Empty heaps. Memory: 24 B an id; 4 B a block of capacity and group are reserved, and taken as a group grows."""
    keys = np.empty((groups, capacity + 1), np.int32)
    where, group = np.full(n_ids, -1, np.int32), np.zeros(n_ids, np.int32)
    return Heads(keys, where, np.zeros(groups, np.int64), np.zeros(n_ids), np.zeros(n_ids, np.int64), group)


@kernel
def heap_of(heads: Heads, group: int) -> Heap:
    """One group's heap, as views."""
    return Heap(heads.keys[group], heads.where, heads.size[group : group + 1], heads.priority, heads.tie)


@kernel
def head(cursor: Cursor, heads: Heads, group: int) -> int:
    """The block of a group that would leave first, -1 for none; what is held is taken out."""
    heap = heap_of(heads, group)
    while heap.size[0] > 0 and cursor.held[heap.keys[0]] > 0:
        discard(heap, heap.keys[0])
    return heap.keys[0] if heap.size[0] > 0 else -1


@kernel
def tag(cursor: Cursor, trace: Trace, heads: Heads, key: int, group: int, priority: float) -> None:
    """Give a block that is touched its group and its place there: least `priority` first, the deeper of equals."""
    if heads.where[key] >= 0:
        discard(heap_of(heads, heads.group[key]), key)
    heads.group[key], heads.priority[key], heads.tie[key] = group, priority, -trace.depth[key]
    if cursor.at[FORM] == PLAIN:
        push(heap_of(heads, group), key)


@kernel
def offer_freed(cursor: Cursor, trace: Trace, heads: Heads, before: int) -> int:
    """To be called after each `advance` with what it returned the last time: what the end of a request freed becomes a candidate."""
    key = freed_by_turn(cursor, trace, before)
    if key >= 0:
        push(heap_of(heads, heads.group[key]), key)
    return cursor.at[REQUEST]


@kernel
def evict(cursor: Cursor, trace: Trace, heads: Heads, victim: int) -> None:
    """Book a block out; its parent may become a candidate."""
    discard(heap_of(heads, heads.group[victim]), victim)
    leave(cursor, trace, victim)
    parent = freed_parent(cursor, trace, victim)
    if parent >= 0:
        push(heap_of(heads, heads.group[parent]), parent)


@kernel
def oldest(cursor: Cursor, heads: Heads) -> int:
    """The head of the least priority over all groups, the deeper of equals: LRU, whatever the groups are. -1 where there is none."""
    best = -1
    for group in range(heads.size.size):
        key = head(cursor, heads, group)
        if key >= 0 and (best < 0 or older(heads, key, best)):
            best = key
    return best


@kernel
def older(heads: Heads, a: int, b: int) -> bool:
    """Whether a block stands before another in the order of all groups."""
    if heads.priority[a] != heads.priority[b]:
        return heads.priority[a] < heads.priority[b]
    return heads.tie[a] < heads.tie[b]
