"""vLLM's block LRU on dense block ids, for all instances of a fleet at once: njit kernels over plain arrays.

Physical blocks wait in a free queue, a doubly linked list; a free block that still carries a hash stays reusable until an allocation pops
it from the front. A request's blocks enter the tail in reverse order when its last holder lets go, so that leaves are evicted before the
blocks they depend on. Two physical blocks may carry one hash (the engine does not merge them): look-ups take the oldest copy, and only
the first store and the last removal of a hash on an instance are events. Source: vLLM v1 `block_pool.py` and `kv_cache_manager.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

# Fields of a physical block. The block at index `slots` is the sentinel of the free queue (NEXT is its front, PREV its tail).
PREV, NEXT, HOLDERS, ID, FREED_US, OLDER, NEWER, BLOCK_FIELDS = range(8)
# Fields of an instance. LIVE counts physical blocks in service, FREE those in the queue, EVICTABLE those of them that carry a hash;
# SPARE heads the list of blocks out of service. LIVE exceeds CAPACITY only while a cut waits for pinned blocks.
FREE, LIVE, CAPACITY, EVICTABLE, SPARE, QUERY_TOKENS, HIT_TOKENS, INCARNATION, INSTANCE_FIELDS = range(9)
# Fields of an event.
SEQ, TS_US, INSTANCE, BLOCK, KIND, REASON, CAUSE_TENANT, IDLE_US, LIFE, EVENT_FIELDS = range(10)
STORED, EVICTED = 0, 1
NO_REASON, PRESSURE, RESIZE, LOST = 0, 1, 2, 3  # LOST: restart, removal or clear
BLOCKED, TOO_BIG = -1, -2  # what `begin` returns instead of a leading run
# Counters of the whole fleet: the next sequence number, events in the buffer, and how many of those the truth has seen.
NEXT_SEQ, EVENTS, OBSERVED, COUNTERS = range(4)


class Caches(NamedTuple):
    """State of every instance's cache; `events` is a buffer that the caller empties (counter EVENTS) and keeps large enough."""

    blocks: npt.NDArray[np.int64]  # [instances, slots + 1, BLOCK_FIELDS]
    heads: npt.NDArray[np.int32]  # [dense ids, instances]: the oldest copy's physical block, -1 where not resident
    instances: npt.NDArray[np.int64]  # [instances, INSTANCE_FIELDS]
    events: npt.NDArray[np.int64]  # [room, EVENT_FIELDS]
    counters: npt.NDArray[np.int64]  # [COUNTERS]


def new_caches(instances: int, slots: int, distinct: int, room: int = 1 << 16) -> Caches:
    """Caches with no block in service; `reset` puts an instance into service. Memory: 56 B a slot and 4 B a dense id, per instance."""
    caches = Caches(
        np.full((instances, slots + 1, BLOCK_FIELDS), -1, np.int64),
        np.full((distinct, instances), -1, np.int32),
        np.zeros((instances, INSTANCE_FIELDS), np.int64),
        np.zeros((room, EVENT_FIELDS), np.int64),
        np.zeros(COUNTERS, np.int64),
    )
    return caches


@njit(cache=True, nogil=True)
def _append(c, i, block, now):  # type: ignore[no-untyped-def]
    blocks = c.blocks[i]
    end = blocks.shape[0] - 1
    tail = blocks[end, PREV]
    blocks[block, PREV], blocks[block, NEXT], blocks[block, FREED_US] = tail, end, now
    blocks[tail, NEXT] = block
    blocks[end, PREV] = block
    c.instances[i, FREE] += 1
    c.instances[i, EVICTABLE] += blocks[block, ID] >= 0


@njit(cache=True, nogil=True)
def _unlink(c, i, block):  # type: ignore[no-untyped-def]
    blocks = c.blocks[i]
    before, after = blocks[block, PREV], blocks[block, NEXT]
    blocks[before, NEXT] = after
    blocks[after, PREV] = before
    c.instances[i, FREE] -= 1
    c.instances[i, EVICTABLE] -= blocks[block, ID] >= 0


@njit(cache=True, nogil=True)
def _event(c, i, now, d, kind, reason, tenant, idle_us):  # type: ignore[no-untyped-def]
    e = c.events[c.counters[EVENTS]]
    e[SEQ], e[TS_US], e[INSTANCE], e[BLOCK] = c.counters[NEXT_SEQ], now, i, d
    e[KIND], e[REASON], e[CAUSE_TENANT], e[IDLE_US] = kind, reason, tenant, idle_us
    e[LIFE] = c.instances[i, INCARNATION]
    c.counters[EVENTS] += 1
    c.counters[NEXT_SEQ] += 1


@njit(cache=True, nogil=True)
def _name(c, i, block, d, now):  # type: ignore[no-untyped-def]
    """Give a physical block its hash: the newest copy of `d`. Copies form a ring, so that the oldest one knows the newest."""
    blocks = c.blocks[i]
    blocks[block, ID] = d
    head = c.heads[d, i]
    if head < 0:
        c.heads[d, i] = block
        blocks[block, OLDER] = blocks[block, NEWER] = block
        _event(c, i, now, d, STORED, NO_REASON, -1, -1)
        return
    newest = blocks[head, OLDER]
    blocks[block, OLDER], blocks[block, NEWER] = newest, head
    blocks[newest, NEWER] = block
    blocks[head, OLDER] = block


@njit(cache=True, nogil=True)
def _unname(c, i, block):  # type: ignore[no-untyped-def]
    """Take a physical block's hash away; true if it was the last copy on this instance."""
    blocks = c.blocks[i]
    d = blocks[block, ID]
    blocks[block, ID] = -1
    older, newer = blocks[block, OLDER], blocks[block, NEWER]
    if newer == block:
        c.heads[d, i] = -1
        return True
    blocks[older, NEWER] = newer
    blocks[newer, OLDER] = older
    if c.heads[d, i] == block:
        c.heads[d, i] = newer
    return False


@njit(cache=True, nogil=True)
def _pop(c, i, now, reason, tenant):  # type: ignore[no-untyped-def]
    """Front of the free queue, stripped of its hash; the caller has made sure that there is one."""
    blocks = c.blocks[i]
    block = blocks[blocks.shape[0] - 1, NEXT]
    _unlink(c, i, block)
    d = blocks[block, ID]
    if d >= 0 and _unname(c, i, block):
        _event(c, i, now, d, EVICTED, reason, tenant, now - blocks[block, FREED_US])
    return block


@njit(cache=True, nogil=True)
def lookup(c, i, ids, start, usable):  # type: ignore[no-untyped-def]
    """Leading run on instance `i`, in blocks: at most `usable` entries of `ids[start:]`."""
    run = 0
    while run < usable and c.heads[ids[start + run], i] >= 0:
        run += 1
    return run


@njit(cache=True, nogil=True)
def leading_runs(c, ids, start, usable, out):  # type: ignore[no-untyped-def]
    """Leading run on every instance, into `out`. Cost: O(instances * longest run)."""
    out[:] = 0
    b = 0
    going = True
    while going and b < usable:
        going = False
        held = c.heads[ids[start + b]]
        for i in range(out.size):
            if out[i] == b and held[i] >= 0:
                out[i] += 1
                going = True
        b += 1


@njit(cache=True, nogil=True)
def begin(c, i, ids, start, usable, need, prompt_tokens, block_size):  # type: ignore[no-untyped-def]
    """Look up a request that needs `need` physical blocks: its leading run in blocks, BLOCKED or TOO_BIG.

    BLOCKED: free blocks do not suffice now (reused free blocks leave the queue too). Otherwise the look-up takes a sequence number and
    counts its tokens; TOO_BIG (more than the capacity) counts without a hit. Cost: O(usable).
    """
    state = c.instances[i]
    run = TOO_BIG
    if need <= state[CAPACITY]:
        run = lookup(c, i, ids, start, usable)
        reused = 0
        for b in range(run):
            reused += c.blocks[i, c.heads[ids[start + b], i], HOLDERS] == 0
        if need - run > state[FREE] - reused:
            return BLOCKED
    c.counters[NEXT_SEQ] += 1
    state[QUERY_TOKENS] += prompt_tokens
    state[HIT_TOKENS] += max(run, 0) * block_size
    return run


@njit(cache=True, nogil=True)
def allocate(c, i, ids, start, run, tenant, now, held):  # type: ignore[no-untyped-def]
    """Pin the leading run and fill `held` up with blocks from the front of the free queue.

    `begin` must just have returned `run`. Evictions become events with reason pressure and the allocating tenant. Cost: O(len(held)).
    """
    blocks = c.blocks[i]
    for b in range(run):
        block = c.heads[ids[start + b], i]
        if blocks[block, HOLDERS] == 0:
            _unlink(c, i, block)
        blocks[block, HOLDERS] += 1
        held[b] = block
    for b in range(run, held.size):
        block = _pop(c, i, now, PRESSURE, tenant)
        blocks[block, HOLDERS] = 1
        held[b] = block


@njit(cache=True, nogil=True)
def store(c, i, ids, start, run, full, now, held):  # type: ignore[no-untyped-def]
    """Name the new full blocks `run .. full` of a request (its partial last block is never named)."""
    for b in range(run, full):
        _name(c, i, held[b], ids[start + b], now)


@njit(cache=True, nogil=True)
def release(c, i, now, held):  # type: ignore[no-untyped-def]
    """Let go of a request's blocks, last one first; then finish a pending capacity cut from the front of the queue."""
    blocks = c.blocks[i]
    for b in range(held.size - 1, -1, -1):
        block = held[b]
        blocks[block, HOLDERS] -= 1
        if blocks[block, HOLDERS] == 0:
            _append(c, i, block, now)
    _shrink(c, i, now)


@njit(cache=True, nogil=True)
def _shrink(c, i, now):  # type: ignore[no-untyped-def]
    state = c.instances[i]
    while state[LIVE] > state[CAPACITY] and state[FREE] > 0:
        block = _pop(c, i, now, RESIZE, -1)
        c.blocks[i, block, NEXT] = state[SPARE]
        state[SPARE] = block
        state[LIVE] -= 1


@njit(cache=True, nogil=True)
def resize(c, i, capacity, now):  # type: ignore[no-untyped-def]
    """Set an instance's capacity in blocks. A cut evicts from the front (reason resize) and takes pinned blocks as they are freed.

    A raise brings empty blocks to the front of the queue, where they are used before anything is evicted.
    """
    state, blocks = c.instances[i], c.blocks[i]
    end = blocks.shape[0] - 1
    state[CAPACITY] = capacity
    while state[LIVE] < capacity:
        block = state[SPARE]
        state[SPARE] = blocks[block, NEXT]
        front = blocks[end, NEXT]
        blocks[block, PREV], blocks[block, NEXT], blocks[block, HOLDERS] = end, front, 0
        blocks[front, PREV] = block
        blocks[end, NEXT] = block
        state[FREE] += 1
        state[LIVE] += 1
    _shrink(c, i, now)


@njit(cache=True, nogil=True)
def clear(c, i):  # type: ignore[no-untyped-def]
    """Take every hash on an instance away, pinned blocks included, without events: one lifecycle row says it all."""
    blocks = c.blocks[i]
    for block in range(blocks.shape[0] - 1):
        if blocks[block, ID] >= 0:
            c.heads[blocks[block, ID], i] = -1
            blocks[block, ID] = -1
    c.instances[i, EVICTABLE] = 0


@njit(cache=True, nogil=True)
def reset(c, i, capacity):  # type: ignore[no-untyped-def]
    """An empty cache of `capacity` blocks in service, nothing pinned, counters at 0: the start of the next incarnation."""
    clear(c, i)
    blocks, state = c.blocks[i], c.instances[i]
    end = blocks.shape[0] - 1
    incarnation = state[INCARNATION] + 1
    state[:] = 0
    state[INCARNATION] = incarnation
    state[SPARE] = -1
    blocks[end, NEXT] = blocks[end, PREV] = end
    for block in range(end - 1, -1, -1):
        blocks[block, NEXT] = state[SPARE]
        blocks[block, HOLDERS] = 0
        state[SPARE] = block
    while state[LIVE] < capacity:
        block = state[SPARE]
        state[SPARE] = blocks[block, NEXT]
        _append(c, i, block, 0)
        state[LIVE] += 1
    state[CAPACITY] = capacity


def free_order(caches: Caches, instance: int) -> list[int]:
    """Dense ids in the free queue, front first, -1 for blocks without a hash; for inspection and tests. Cost: O(free blocks)."""
    blocks = caches.blocks[instance]
    end = len(blocks) - 1
    order, block = [], int(blocks[end, NEXT])
    while block != end:
        order.append(int(blocks[block, ID]))
        block = int(blocks[block, NEXT])
    return order
