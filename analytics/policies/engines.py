"""What engines and KV stores do when they are full: vLLM, SGLang, RTP-LLM, LMCache and Mooncake Store, in both forms.

One request runs at a time here, so what engines do about those that run side by side (references, locks, insertion after prefill,
duplicates, the recomputed last token) is the fleet emulator's, not these policies'.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from analytics.policies.cursor import FORM, HIT, INDEX, KEY, LIMIT, PLAIN, REQUEST, Cursor, Trace, advance, enter, full, leave
from analytics.policies.heads import Heads, evict, head, make_heads, offer_freed, tag
from analytics.policies.lists import pop_free
from analytics.policies.queues import Queues, append, kernel, length, make_queues, queue_of, remove

Bools = npt.NDArray[np.bool_]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]

BLOCK, NODE, CHAIN = range(3)  # what leaves at once: a block, the rest of a radix node, all up to a fork
WEIGHT_CLASSES, CLASSES_AN_OCTAVE = 64, 4
OPEN, SOFT = range(2)


def vllm_lru(trace: Trace, cursor: Cursor, capacity: int) -> None:
    """vLLM's free queue: a block in use stands in no queue; a request that ends appends its blocks deepest first; the front leaves.

    Prefix-safe this is `lru`. In the plain form the deepest block of a chain is the oldest of it, where `lru` has the head. A plain chain
    longer than the cache overwrites its own deepest block, where vLLM would wait. Source: vLLM v1, `block_pool.py`.
    """
    _by_recency(trace, cursor, make_queues(trace.parent.size, capacity), *_flags(trace, 0), BLOCK)


def sglang_leaf_lru(trace: Trace, cursor: Cursor, capacity: int) -> None:
    """SGLang's radix tree: the leaf node used least recently leaves whole, so more may leave than is needed.

    A node ends where a prompt ended or where one parted from it, and nodes are never joined again. The lower half of a node that is split
    keeps its time (SGLang refreshes it). In the plain form there is no tree: then it is `vllm_lru`. Source: SGLang, `radix_cache.py` and
    `evict_policy.py`.
    """
    _by_recency(trace, cursor, make_queues(trace.parent.size, capacity), *_flags(trace, 0), NODE)


def rtp_llm(trace: Trace, cursor: Cursor, capacity: int, resident_requests: int = 0) -> None:
    """RTP-LLM's shared block cache: the leaf used least recently leaves with all above it up to a fork; resident blocks never do.

    An operator makes the blocks of configured prompts resident. Traces do not say which: here it is the chains of the first
    `resident_requests` requests, up to half of the capacity and so that the longest chain still has room. In the plain form single blocks
    leave, as from its `BlockCache`. Source: RTP-LLM, `BlockCache` and `SharedBlockCache::selectAndEvict`.
    """
    longest = int(np.diff(trace.offsets).max(initial=0))
    flags = _flags(trace, min(resident_requests, trace.offsets.size - 1), max(0, min(capacity // 2, capacity - longest)))
    _by_recency(trace, cursor, make_queues(trace.parent.size, capacity), *flags, CHAIN)


def _flags(trace: Trace, resident_requests: int, most: int = 0) -> tuple[Bools, Bools]:
    """Which ids end a node (none yet), and which are resident: the first `most` ids of the first requests."""
    ends, resident = np.zeros(trace.parent.size, np.bool_), np.zeros(trace.parent.size, np.bool_)
    ids = trace.ids[: trace.offsets[resident_requests]]
    resident[ids[np.sort(np.unique(ids, return_index=True)[1])][:most]] = True
    return ends, resident


@kernel
def _by_recency(trace: Trace, cursor: Cursor, queues: Queues, ends: Bools, resident: Bools, unit: int) -> None:
    plain, before = cursor.at[FORM] == PLAIN, -1
    while advance(cursor, trace):
        key = cursor.at[KEY]
        if cursor.at[REQUEST] != before:
            if plain:
                _release(trace, cursor, queues, before)
            elif unit == NODE:
                _split(trace, cursor, ends)
            before = cursor.at[REQUEST]
        if cursor.at[HIT]:
            if queue_of(queues, key) >= 0:
                remove(queues, key)
        else:
            while full(cursor):
                _make_room(trace, cursor, queues, ends, resident, unit)
            enter(cursor, trace, key)
        if not plain and not resident[key]:
            append(queues, 0, key)
        elif plain and not resident[key]:
            cursor.held[key] = 1  # in use until its request ends


@kernel
def _release(trace: Trace, cursor: Cursor, queues: Queues, request: int) -> None:
    """End a request of the plain form: what it used becomes free, the deepest block first."""
    if request < 0:
        return
    for i in range(trace.offsets[request + 1] - 1, trace.offsets[request] - 1, -1):
        key = trace.ids[i]
        if cursor.held[key] > 0:
            cursor.held[key] = 0
            append(queues, 0, key)


@kernel
def _split(trace: Trace, cursor: Cursor, ends: Bools) -> None:
    """The last block that a request found ends a node, and so does its own last block."""
    start = trace.offsets[cursor.at[REQUEST]]
    last = start + cursor.at[LIMIT] - 1
    ends[trace.ids[last]] = True
    while last >= start and not cursor.hits[last]:
        last -= 1
    if last >= start:
        ends[trace.ids[last]] = True


@kernel
def _make_room(trace: Trace, cursor: Cursor, queues: Queues, ends: Bools, resident: Bools, unit: int) -> None:
    if length(queues, 0) == 0:  # plain, and all is in use: the running chain gives up its deepest block
        back = cursor.at[INDEX] - 1
        while cursor.held[trace.ids[back]] == 0:
            back -= 1
        cursor.held[trace.ids[back]] = 0
        leave(cursor, trace, trace.ids[back])
        return
    key = pop_free(cursor, queues, 0)
    leave(cursor, trace, key)
    if cursor.at[FORM] == PLAIN or unit == BLOCK:
        return
    ends[key] = False
    key = trace.parent[key]
    while key >= 0 and cursor.resident[key] and cursor.held[key] == 0 and not resident[key] and not (unit == NODE and ends[key]):
        remove(queues, key)
        leave(cursor, trace, key)
        ends[key] = False
        key = trace.parent[key]


def lmcache_cost(trace: Trace, cursor: Cursor, capacity: int, idle_s: float = 60.0, new_share: float = 0.2) -> None:
    """LMCache's cost-aware policy: evict the least recompute value over idle time.

    A block's value is the tokens of the prompt from its start to the prompt's end, averaged over its uses (`new_share` for the newest),
    over 1 + seconds since the last use / `idle_s`. LMCache looks through all chunks; here those of nearly the same value (a quarter of an
    octave) stand in one group by recency and the groups' heads are compared. Source: LMCache, `cache_policy/cost_aware`.
    """
    heads = make_heads(trace.parent.size, capacity, WEIGHT_CLASSES)
    _lmcache(trace, cursor, heads, np.zeros(trace.parent.size), idle_s * 1e6, new_share)


@kernel
def _lmcache(trace: Trace, cursor: Cursor, heads: Heads, value: F64, idle_us: float, new_share: float) -> None:
    before = -1
    while advance(cursor, trace):
        key, request = cursor.at[KEY], cursor.at[REQUEST]
        before = offer_freed(cursor, trace, heads, before)
        after = max(1.0, float(trace.prompt_tokens[request] - trace.depth[key] * trace.block_size))
        if cursor.at[HIT]:
            value[key] += new_share * (after - value[key])
        else:
            while full(cursor):
                evict(cursor, trace, heads, _least_value(trace, cursor, heads, value, idle_us))
            enter(cursor, trace, key)
            value[key] = after
        group = min(int(CLASSES_AN_OCTAVE * np.log2(value[key])), WEIGHT_CLASSES - 1)
        tag(cursor, trace, heads, key, group, float(request))


@kernel
def _least_value(trace: Trace, cursor: Cursor, heads: Heads, value: F64, idle_us: float) -> int:
    best, least, now_us = -1, np.inf, trace.ts_us[cursor.at[REQUEST]]
    for group in range(heads.size.size):
        key = head(cursor, heads, group)
        if key >= 0:
            score = value[key] / (1.0 + (now_us - trace.ts_us[int(heads.priority[key])]) / idle_us)
            if score < least:
                best, least = key, score
    return best


def mooncake_lease(
    trace: Trace, cursor: Cursor, capacity: int, lease_s: float = 10.0, watermark_ratio: float = 0.9, evict_ratio: float = 0.05,
    soft_pin_blocks: int = 0, soft_pin_s: float = 1800.0,
) -> None:  # fmt: skip
    """Mooncake Store: full to the watermark, `evict_ratio` of the store leaves at once, the longest expired lease first.

    A read leases a block for `lease_s`, a write until now; what is leased is passed over. The first `soft_pin_blocks` blocks of a chain are
    soft-pinned: they go only if nothing else can, and count as others `soft_pin_s` after their last use. `capacity` is what the store holds
    at the watermark (the store is 1/`watermark_ratio` of that). Where all is leased a put fails in Mooncake; here one block leaves
    nevertheless. Source: Mooncake Store, `master_service` documentation.
    """
    batch = max(1, math.ceil(capacity * evict_ratio / watermark_ratio))
    heads = make_heads(trace.parent.size, capacity, 2)
    _mooncake(trace, cursor, heads, lease_s * 1e6, batch, soft_pin_blocks, soft_pin_s * 1e6)


@kernel
def _mooncake(trace: Trace, cursor: Cursor, heads: Heads, lease_us: float, batch: int, soft_pin_blocks: int, soft_pin_us: float) -> None:
    before = -1
    while advance(cursor, trace):
        key, now_us = cursor.at[KEY], trace.ts_us[cursor.at[REQUEST]]
        before = offer_freed(cursor, trace, heads, before)
        if not cursor.at[HIT] and full(cursor):
            for done in range(batch):
                victim = _expired(cursor, heads, now_us, lease_us, soft_pin_us, done == 0)
                if victim < 0:
                    break
                evict(cursor, trace, heads, victim)
        if not cursor.at[HIT]:
            enter(cursor, trace, key)
        lease = now_us + lease_us if cursor.at[HIT] else float(now_us)
        tag(cursor, trace, heads, key, SOFT if trace.depth[key] < soft_pin_blocks else OPEN, lease)


@kernel
def _expired(cursor: Cursor, heads: Heads, now_us: int, lease_us: float, soft_pin_us: float, forced: bool) -> int:
    """The block to evict next: not leased, not soft-pinned, then soft-pinned, then (if one must) whatever its lease ends first."""
    free, soft = head(cursor, heads, OPEN), head(cursor, heads, SOFT)
    if soft >= 0 and heads.priority[soft] + soft_pin_us - lease_us <= now_us and (free < 0 or heads.priority[soft] < heads.priority[free]):
        return soft
    if free >= 0 and heads.priority[free] <= now_us:
        return free
    if soft >= 0 and heads.priority[soft] <= now_us:
        return soft
    if not forced:
        return -1
    return free if free >= 0 else soft
