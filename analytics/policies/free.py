"""Which blocks may leave: a pool of candidates and a heap of them, for policies that choose among what is not held.

In the plain form every resident block may leave. In the prefix form a block stops being held in two ways only: its last child leaves
(`freed_parent`), or the request that ends looked at nothing behind it (`freed_by_turn`; every other block of that chain now has a child).
So a pool or heap to which both are offered never misses a block that may leave; what became held since is dropped when it is met.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from analytics.policies.cursor import CAPACITY, FORM, PREFIX, REQUEST, Cursor, Trace
from analytics.policies.queues import kernel

F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


@kernel
def freed_by_turn(cursor: Cursor, trace: Trace, before: int) -> int:
    """Block that the end of request `before` freed, -1 for none; ask after `advance` when the request has changed."""
    if cursor.at[FORM] != PREFIX or before < 0 or before == cursor.at[REQUEST]:
        return -1
    start = trace.offsets[before]
    looked_at = min(trace.offsets[before + 1] - start, cursor.at[CAPACITY])
    key = trace.ids[start + looked_at - 1] if looked_at > 0 else -1
    return key if key >= 0 and cursor.resident[key] and cursor.held[key] == 0 else -1


@kernel
def freed_parent(cursor: Cursor, trace: Trace, left: int) -> int:
    """Block that the leaving of its child `left` freed, -1 for none."""
    if cursor.at[FORM] != PREFIX:
        return -1
    parent = trace.parent[left]
    return parent if parent >= 0 and cursor.resident[parent] and cursor.held[parent] == 0 else -1


class Pool(NamedTuple):
    """A set to draw from: `keys` int32[room] of which `size[0]` count · `where` int32[n_ids] (-1: not in it)."""

    keys: I32
    where: I32
    size: I64


def make_pool(n_ids: int, capacity: int) -> Pool:
    """An empty pool of at most `capacity` ids."""
    return Pool(np.empty(capacity + 1, np.int32), np.full(n_ids, -1, np.int32), np.zeros(1, np.int64))


@kernel
def offer(pool: Pool, key: int) -> None:
    """Put an id in, unless it is -1 or there already."""
    if key >= 0 and pool.where[key] < 0:
        pool.keys[pool.size[0]] = key
        pool.where[key] = pool.size[0]
        pool.size[0] += 1


@kernel
def drop(pool: Pool, key: int) -> None:
    """Take an id out, if it is there."""
    at = pool.where[key]
    if at >= 0:
        pool.size[0] -= 1
        last = pool.keys[pool.size[0]]
        pool.keys[at], pool.where[last] = last, at
        pool.where[key] = -1


@kernel
def draw(cursor: Cursor, pool: Pool, random: U64) -> int:
    """An id that is not held, uniformly; there must be one."""
    key = pool.keys[below(random, pool.size[0])]
    while cursor.held[key] > 0:
        drop(pool, key)
        key = pool.keys[below(random, pool.size[0])]
    return key


@kernel
def below(random: U64, bound: int) -> int:
    """Next number in [0, bound) of the splitmix64 counter `random[0]`. Source: Steele, Lea and Flood, OOPSLA 2014."""
    random[0] += np.uint64(0x9E3779B97F4A7C15)
    x = random[0]
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return np.int64((x >> np.uint64(32)) * np.uint64(bound) >> np.uint64(32))  # type: ignore[return-value]


def seeded(seed: int) -> U64:
    """A counter for `below`."""
    return np.array([seed], np.uint64)


class Heap(NamedTuple):
    """Ids by `priority` float64[n_ids], then `tie` int64[n_ids], least first: `keys` int32[room], `where`, `size` as of a `Pool`."""

    keys: I32
    where: I32
    size: I64
    priority: F64
    tie: I64


def make_heap(n_ids: int, capacity: int) -> Heap:
    """An empty heap of at most `capacity` ids."""
    return Heap(*make_pool(n_ids, capacity), np.zeros(n_ids), np.zeros(n_ids, np.int64))


@kernel
def push(heap: Heap, key: int) -> None:
    """Put an id in with the priority that it has, or move it there if it is in already; -1 is nothing."""
    if key < 0:
        return
    if heap.where[key] < 0:
        heap.where[key] = heap.size[0]
        heap.keys[heap.size[0]] = key
        heap.size[0] += 1
    _settle(heap, key)


@kernel
def discard(heap: Heap, key: int) -> None:
    """Take an id out, if it is there."""
    at = heap.where[key]
    if at >= 0:
        heap.size[0] -= 1
        last = heap.keys[heap.size[0]]
        heap.keys[at], heap.where[last] = last, at
        heap.where[key] = -1
        if last != key:
            _settle(heap, last)


@kernel
def least_free(cursor: Cursor, heap: Heap) -> int:
    """The least id that is not held; it stays. There must be one."""
    while cursor.held[heap.keys[0]] > 0:
        discard(heap, heap.keys[0])
    return heap.keys[0]


@kernel
def _settle(heap: Heap, key: int) -> None:
    at = heap.where[key]
    while at > 0 and _before(heap, key, heap.keys[(at - 1) >> 1]):
        at = _swap_in(heap, heap.keys[(at - 1) >> 1], at)
    while 2 * at + 1 < heap.size[0]:
        child = 2 * at + 1
        if child + 1 < heap.size[0] and _before(heap, heap.keys[child + 1], heap.keys[child]):
            child += 1
        if not _before(heap, heap.keys[child], key):
            break
        at = _swap_in(heap, heap.keys[child], at)
    heap.keys[at], heap.where[key] = key, at


@kernel
def _swap_in(heap: Heap, key: int, at: int) -> int:
    """Move an id to a place; returns the place that it left."""
    left = heap.where[key]
    heap.keys[at], heap.where[key] = key, at
    return left


@kernel
def _before(heap: Heap, a: int, b: int) -> bool:
    if heap.priority[a] != heap.priority[b]:
        return heap.priority[a] < heap.priority[b]
    return heap.tie[a] < heap.tie[b]
