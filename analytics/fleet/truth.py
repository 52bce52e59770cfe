"""Ground truth: why each prompt token of the emulator was not served from local KV, read from the emulator's own caches.

The tests are those of docs/design.md section 5, block by block and in that order. Nothing here is shared with the stream's attribution.
No kernel here calls one of another module: numba's cache notices a change in a kernel's own file only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from analytics.fleet.cache import BLOCK, CAUSE_TENANT, EVENTS, ID, KIND, LOST, NO_REASON, OBSERVED, REASON, RESIZE, STORED

CAUSES = (
    "hit",
    "granularity",
    "unobserved",
    "routing",
    "broken_prefix",
    "in_flight",
    "not_stored",
    "instance",
    "capacity_self",
    "capacity_other",
    "capacity_resize",
    "cold",
    "beyond",
)
(HIT, GRANULARITY, UNOBSERVED, ROUTING, BROKEN_PREFIX, IN_FLIGHT, NOT_STORED, INSTANCE_LOSS,
 CAPACITY_SELF, CAPACITY_OTHER, CAPACITY_RESIZE, COLD, BEYOND) = range(len(CAUSES))  # fmt: skip

# Fields of a mark: the latest end of a request that missed the block and saw no store since (-1: none), and what removed it last.
ASKED_END_US, REMOVED_BY, REMOVED_FOR, MARK_FIELDS = range(4)


class Truth(NamedTuple):
    """Marks per dense id and the resulting tokens per request and cause; `cause_tenant` is who evicted most of it, -1 for nobody."""

    marks: npt.NDArray[np.int64]  # [dense ids, MARK_FIELDS]
    tokens: npt.NDArray[np.int64]  # [requests, len(CAUSES)]
    cause_tenant: npt.NDArray[np.int32]  # [requests]
    going: npt.NDArray[np.bool_]  # scratch, [instances]
    evictors: npt.NDArray[np.int64]  # scratch, [tenants]


def new_truth(distinct: int, requests: int, instances: int, tenants: int) -> Truth:
    """Truth of a fleet that has served nothing yet."""
    marks = np.zeros((distinct, MARK_FIELDS), np.int64)
    marks[:, ASKED_END_US] = -1
    tokens = np.zeros((requests, len(CAUSES)), np.int64)
    return Truth(marks, tokens, np.full(requests, -1, np.int32), np.zeros(instances, np.bool_), np.zeros(tenants, np.int64))


@njit(cache=True, nogil=True)
def observe(c, t):  # type: ignore[no-untyped-def]
    """Bring the marks up to date with the events since the last call. Cost: O(events)."""
    for k in range(c.counters[OBSERVED], c.counters[EVENTS]):
        e = c.events[k]
        mark = t.marks[e[BLOCK]]
        if e[KIND] == STORED:
            mark[ASKED_END_US] = -1
        else:
            mark[REMOVED_BY] = e[REASON]
            mark[REMOVED_FOR] = e[CAUSE_TENANT]
    c.counters[OBSERVED] = c.counters[EVENTS]


@njit(cache=True, nogil=True)
def lose(c, t, i):  # type: ignore[no-untyped-def]
    """Mark all that instance `i` holds as lost with it; to be called just before its cache is cleared. Cost: O(capacity)."""
    observe(c, t)
    blocks = c.blocks[i]
    for block in range(blocks.shape[0] - 1):
        d = blocks[block, ID]
        if d >= 0:
            t.marks[d, REMOVED_BY] = LOST


@njit(cache=True, nogil=True)
def _cause(c, t, d, tenant, now):  # type: ignore[no-untyped-def]
    """Cause of one block past every leading run."""
    held = c.heads[d]
    for i in range(held.size):
        if held[i] >= 0:
            return BROKEN_PREFIX
    mark = t.marks[d]
    if mark[ASKED_END_US] >= 0:
        return IN_FLIGHT if now < mark[ASKED_END_US] else NOT_STORED
    if mark[REMOVED_BY] == NO_REASON:
        return COLD
    if mark[REMOVED_BY] == LOST:
        return INSTANCE_LOSS
    if mark[REMOVED_BY] == RESIZE:
        return CAPACITY_RESIZE
    return CAPACITY_SELF if mark[REMOVED_FOR] == tenant else CAPACITY_OTHER


@njit(cache=True, nogil=True)
def _longest_elsewhere(c, t, i, ids, start, usable):  # type: ignore[no-untyped-def]
    """Longest leading run that an instance other than `i` holds, in blocks."""
    t.going[:] = True
    t.going[i] = False
    for b in range(usable):
        held = c.heads[ids[start + b]]
        left = False
        for j in range(held.size):
            t.going[j] = t.going[j] and held[j] >= 0
            left = left or t.going[j]
        if not left:
            return b
    return usable


@njit(cache=True, nogil=True)
def account(c, t, r, i, ids, start, full, hit_blocks, prompt_tokens, block_size, tenant, now, end_us):  # type: ignore[no-untyped-def]
    """Account for every prompt token of request `r` at its look-up on instance `i`, before it allocates anything.

    The request's chain is `ids[start:start + full]`, its prefill ends at `end_us` (`now` if it failed). Full blocks that the workload
    does not name (a chain shorter than the prompt) cannot be explained: they are `unobserved`. Cost: O(full * instances).
    """
    observe(c, t)
    blocks = max(prompt_tokens - 1, 0) // block_size
    usable = min(full, blocks)
    out = t.tokens[r]
    out[:] = 0
    out[HIT] = hit_blocks * block_size
    out[GRANULARITY] = prompt_tokens - blocks * block_size
    out[UNOBSERVED] = (blocks - usable) * block_size
    elsewhere = _longest_elsewhere(c, t, i, ids, start, usable) if usable > hit_blocks else 0
    t.evictors[:] = 0
    for b in range(hit_blocks, usable):
        if b < elsewhere:
            out[ROUTING] += block_size
            continue
        d = ids[start + b]
        cause = _cause(c, t, d, tenant, now)
        out[cause] += block_size
        if cause == CAPACITY_OTHER:
            t.evictors[t.marks[d, REMOVED_FOR]] += 1
    t.cause_tenant[r] = t.evictors.argmax() if out[CAPACITY_OTHER] > 0 else -1
    _ask(c, t, i, ids, start, hit_blocks, full, end_us)


@njit(cache=True, nogil=True)
def _ask(c, t, i, ids, start, hit_blocks, full, end_us):  # type: ignore[no-untyped-def]
    """Remember that a request which ends at `end_us` missed these blocks on instance `i`.

    A block that the instance holds but could not reach is not asked for: its second copy would be no event.
    """
    for b in range(hit_blocks, full):
        d = ids[start + b]
        if c.heads[d, i] < 0:
            t.marks[d, ASKED_END_US] = max(t.marks[d, ASKED_END_US], end_us)
